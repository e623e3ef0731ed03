"""A private mount namespace in which `/opt/ml` is the tree of an instance, for code that uses `/opt/ml` itself.

`python -I -S mount_namespace.py TREE COMMAND...` executes the command in such a namespace if possible, or else without
one. The machine's /opt is not changed: other processes do not see the mounts, which end with the last process in the
namespace. The file runs on its own, with the standard library only and no import of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile

SWITCH_VARIABLE = "CLOUDTRAIN_ML_NAMESPACE"
"""`off` runs without a namespace."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    32,
    4096,
    16384,
    1 << 18,
)  # linux/mount.h
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h
_OPT, _ML = "/opt", "/opt/ml"


def wrap(tree: str, command: list[str]) -> list[str]:
    """Return a command that starts a command in the namespace, if this machine supports it."""
    return [sys.executable, "-I", "-S", __file__, tree, *command] if _is_enabled() else command


def is_available() -> bool:
    """Whether this user can create the namespace on this machine; it tries."""
    if not _is_enabled():
        return False
    with tempfile.TemporaryDirectory() as tree:
        check = "import os, sys; sys.exit(not os.path.samefile('/opt/ml', sys.argv[1]))"
        command = wrap(tree, [sys.executable, "-I", "-S", "-c", check, tree])
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _is_enabled() -> bool:
    return sys.platform == "linux" and os.environ.get(SWITCH_VARIABLE, "") != "off"


def _try(tree: str) -> bool:
    """Whether `_enter` works. A child tries it, because a partial failure would change the user of this process."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            _enter(tree)
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _enter(tree: str) -> None:
    """Enter a mount namespace in which `/opt/ml` is the tree, with the same user and group ids."""
    user, group = os.geteuid(), os.getegid()
    signal = ctypes.c_int()
    _call("prctl", _PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    try:
        _call(
            "unshare", _CLONE_NEWNS
        )  # root needs no user namespace, which would change the owners of files
    except OSError:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 (starts faster)
                file.write(text)
    _call("prctl", _PR_SET_PDEATHSIG, signal.value, 0, 0, 0)
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    if not os.path.isdir(_ML):  # noqa: PTH112
        _create_mount_point()
    _mount(tree, _ML, _MS_BIND | _MS_REC)


def _create_mount_point() -> None:
    """Mount a folder over /opt that shows its content and an empty `ml`."""
    below = os.open(_OPT, os.O_RDONLY | os.O_DIRECTORY)
    entries = list(os.scandir(below))
    _mount("tmpfs", _OPT, 0, "tmpfs")
    for entry in entries:
        target, source = f"{_OPT}/{entry.name}", f"/proc/self/fd/{below}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.name, dir_fd=below), target)  # noqa: PTH211
            continue
        if entry.is_dir():
            os.mkdir(target)  # noqa: PTH102
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(source, target, _MS_BIND | _MS_REC)
    os.mkdir(_ML)  # noqa: PTH102
    os.close(below)
    _mount("none", _OPT, _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def _mount(source: str, target: str, flags: int, kind: str = "none") -> None:
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode(),
        ctypes.c_ulong(flags),
        b"mode=755" * (kind != "none") or None,
    )


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    if _try(sys.argv[1]):
        _enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 (no shell on purpose)
