"""Atomic writes of files, and reads with a size limit."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path


def write_atomically(
    path: Path, text: str, *, private: bool = False, errors: str = "strict"
) -> None:
    """Replace a text file atomically: readers see the old content or the new one, never a part.

    Args:
        path: The file, which need not exist.
        text: The new content; line endings are kept.
        private: Let only the owner read the file.
        errors: How characters are written that UTF-8 lacks, as in `str.encode`.

    Raises:
        OSError: the file cannot be written, which the error names. It is unchanged, and no temporary file remains.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        if private:
            partial.touch(0o600)
        partial.write_text(text, encoding="utf-8", errors=errors, newline="")
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            # A write fails without the name of its file.
            error.filename = str(path)
        raise


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return at most `most_bytes + 1` bytes of a regular file, so that a longer file can be detected.

    Raises:
        OSError: the file cannot be read, or is a pipe or device, whose content may be endless.
        ValueError: the name contains a NUL.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file but a pipe or device", str(path))
        return file.read(most_bytes + 1)
