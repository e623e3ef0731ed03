"""Errors of the machine that a command runs on: a full disk, missing permissions, closed output."""

from __future__ import annotations

import errno
import os
import sys

from cloudtrain.errors import UserError

_HINTS = {
    errno.ENOSPC: "free some space, or choose another folder for local runs: CLOUDTRAIN_HOME",
    errno.EDQUOT: "free some of your quota, or choose another folder for local runs: CLOUDTRAIN_HOME",
    errno.EROFS: "choose a folder that can be written: CLOUDTRAIN_HOME",
    errno.EACCES: "ask its owner for permission, or choose another folder for local runs: CLOUDTRAIN_HOME",
    errno.EPERM: "ask its owner for permission, or choose another folder for local runs: CLOUDTRAIN_HOME",
    errno.ENOTDIR: "choose a folder for local runs: CLOUDTRAIN_HOME",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount the network folder again",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "close other programs",
    errno.ENOMEM: "free some memory",
    errno.EBADF: "give the command an output that can be written",
}


def describe_os_error(error: OSError) -> UserError | None:
    """Return the user error for an operating-system error, or None for one that is a bug of cloudtrain."""
    if _is_working_directory_gone():
        return UserError("the working directory was deleted", "change to a directory that exists")
    if error.errno not in _HINTS:
        return None
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the output or a file cannot be written: {error.strerror}",
            "free some space where the output goes, and where local runs are: CLOUDTRAIN_HOME",
        )
    place = "the output" if error.filename is None else os.fsdecode(error.filename)
    return UserError(f"{place}: {error.strerror}", _HINTS[error.errno])


def discard_output() -> None:
    """Redirect standard output to the null device, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_missing_streams() -> None:
    """Open the null device for each of the descriptors 0, 1 and 2 that the caller has closed.

    Otherwise the next opened file would get the descriptor, and the output of child processes would go into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _is_working_directory_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 (only whether there is one)
    except FileNotFoundError:
        return True
    return False
