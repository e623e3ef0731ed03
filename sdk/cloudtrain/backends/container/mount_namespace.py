"""A private mount namespace in which `/opt/ml` is the tree of an instance, and its data a copy of the user's.

`python -I -S mount_namespace.py TREE COMMAND...` executes the command in such a namespace if possible, or else without
one, unless folders are to be mounted into the tree (`mounts`, beside it). Without a command, its exit code says whether
a namespace is possible. The machine's /opt is not changed: other processes do not see the mounts, which end with the
last process in the namespace. The file runs on its own, with the standard library only and no import of this package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

SWITCH_VARIABLE = "CLOUDTRAIN_ML_NAMESPACE"
"""`off` runs without a namespace."""

# From linux/sched.h.
_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
# From linux/mount.h.
_MS_RDONLY = 1
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_OPT = "/opt"
_ML = "/opt/ml"

SOURCE, UPPER, WORK, MERGED = "source", "upper", "work", "merged"
"""What the folder of a copied channel contains: a link to the data, the layers of an overlay, and the overlay."""


def wrap(tree: str, command: list[str]) -> list[str]:
    """Return a command that starts a command in the namespace, if this machine supports it."""
    if not is_enabled():
        return command
    return [sys.executable, "-I", "-S", __file__, tree, *command]


def copies_of(tree: str) -> str:
    """Return the folder of an instance's copied channels, beside its tree."""
    return os.path.join(os.path.dirname(os.path.dirname(tree)), "copies")  # noqa: PTH118, PTH120 (starts faster)


def mounts_of(tree: str) -> str:
    """Return the folder with links to the folders that are mounted into an instance's tree, beside the tree."""
    return os.path.join(os.path.dirname(os.path.dirname(tree)), "mounts")  # noqa: PTH118, PTH120 (starts faster)


def mounted_names(tree: str) -> list[str]:
    """Return the paths below the tree at which other folders are mounted."""
    top = mounts_of(tree)
    return [
        os.path.relpath(f"{folder}/{name}", top)
        for folder, folders, _ in os.walk(top)
        for name in folders
        if os.path.islink(f"{folder}/{name}")  # noqa: PTH114
    ]


def link_mounts(tree: str) -> None:
    """Let links in the tree lead to what was mounted there, for programs outside of the namespace."""
    for name in mounted_names(tree):
        # Not where a program outside has written to the empty folder.
        with contextlib.suppress(OSError):
            os.rmdir(f"{tree}/{name}")  # noqa: PTH106
            os.symlink(os.readlink(f"{mounts_of(tree)}/{name}"), f"{tree}/{name}")  # noqa: PTH115, PTH211


def link_source(copy: str) -> None:
    """Let the folder of a copied channel lead to the data itself."""
    merged = f"{copy}/{MERGED}"
    if not os.path.islink(merged):  # noqa: PTH114
        os.rmdir(merged)  # noqa: PTH106
        os.symlink(os.readlink(f"{copy}/{SOURCE}"), merged)  # noqa: PTH115, PTH211


def is_available() -> bool:
    """Whether this user can create the namespace on this machine; it tries, once in each process."""
    return is_enabled() and _is_possible()


@functools.cache
def _is_possible() -> bool:
    # Each instance starts with this file, which needs neither.
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as tree:
        command = wrap(tree, [])
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


def is_enabled() -> bool:
    """Return whether a namespace may be used on this machine."""
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
    import ctypes

    user = os.geteuid()
    group = os.getegid()
    signal = ctypes.c_int()
    _call("prctl", _PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    try:
        # Root needs no user namespace, which would change the owners of files.
        _call("unshare", _CLONE_NEWNS)
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
    for copy in _copies(tree):
        _mount_copy(copy)
    if not os.path.isdir(_ML):  # noqa: PTH112
        _create_mount_point()
    _mount(tree, _ML, _MS_BIND | _MS_REC)
    # A link would show programs that resolve their paths another folder in each run.
    for name in mounted_names(tree):
        _mount(f"{mounts_of(tree)}/{name}", f"{_ML}/{name}", _MS_BIND | _MS_REC)
    os.chdir(_ML)


def _copies(tree: str) -> list[str]:
    """Return the folders of an instance's copied channels."""
    folder = copies_of(tree)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []  # noqa: PTH112, PTH208
    return [f"{folder}/{name}" for name in names]


def _mount_copy(copy: str) -> None:
    """Show the data of a channel such that nothing of it can be changed.

    As an overlay if the file systems allow it, or else read-only, or else as it is, with a warning.
    """
    merged = f"{copy}/{MERGED}"
    if os.path.islink(merged):  # noqa: PTH114
        return
    source = os.readlink(f"{copy}/{SOURCE}")  # noqa: PTH115
    # An overlay shows nothing of file systems that are mounted below the folder.
    if not _has_mounts_below(source):
        # Numbers of open folders, because names may contain what separates the options.
        layers = [os.open(f"{copy}/{name}", os.O_RDONLY) for name in (SOURCE, UPPER, WORK)]
        lower, upper, work = (f"/proc/self/fd/{number}" for number in layers)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        try:
            # `userxattr` is needed in a user namespace.
            for more in ("", ",userxattr"):
                with contextlib.suppress(OSError):
                    _mount("overlay", merged, 0, "overlay", options + more)
                    return
        finally:
            for number in layers:
                os.close(number)
        with contextlib.suppress(OSError):
            _mount(source, merged, _MS_BIND)
            _mount("none", merged, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _locked_flags(source))
            return
    _warn_of_source(source)
    with contextlib.suppress(OSError):
        _call("umount2", os.fsencode(merged), 2)
    link_source(copy)


def _warn_of_source(source: str) -> None:
    sys.stderr.write(
        f"warning: this machine cannot protect {source}: what the job changes there, it changes in your own files\n"
    )
    sys.stderr.flush()


def _has_mounts_below(folder: str) -> bool:
    with open("/proc/self/mountinfo", "rb") as file:  # noqa: PTH123 (starts faster)
        points = [line.split()[4] for line in file]
    return any(point.startswith(os.fsencode(folder.rstrip("/")) + b"/") for point in points)


def _locked_flags(path: str) -> int:
    """Return the flags of a mount that a user namespace must repeat to change another one: nosuid, nodev, noexec."""
    return os.statvfs(path).f_flag & (2 | 4 | 8)


def _create_mount_point() -> None:
    """Mount a folder over /opt that shows its content and an empty `ml`."""
    below = os.open(_OPT, os.O_RDONLY | os.O_DIRECTORY)
    entries = list(os.scandir(below))
    _mount("tmpfs", _OPT, 0, "tmpfs")
    for entry in entries:
        target = f"{_OPT}/{entry.name}"
        source = f"/proc/self/fd/{below}/{entry.name}"
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


def _mount(source: str, target: str, flags: int, kind: str = "none", options: str = "") -> None:
    import ctypes

    given = options or "mode=755" * (kind == "tmpfs")
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode(),
        ctypes.c_ulong(flags),
        given.encode() or None,
    )


def _call(name: str, *arguments: object) -> None:
    import ctypes

    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    if not sys.argv[2:]:
        with contextlib.suppress(OSError):
            _enter(sys.argv[1])
        sys.exit(not (os.path.isdir(_ML) and os.path.samefile(_ML, sys.argv[1])))  # noqa: PTH112, PTH121
    if _try(sys.argv[1]):
        _enter(sys.argv[1])
    elif os.path.isdir(mounts_of(sys.argv[1])):  # noqa: PTH112
        # The job's paths are those of the namespace, which the machine has allowed a moment ago.
        sys.exit(
            f"error: the machine has refused the mount namespace of /opt/ml; {SWITCH_VARIABLE}=off runs without one"
        )
    else:
        for _copy in _copies(sys.argv[1]):
            _warn_of_source(os.readlink(f"{_copy}/{SOURCE}"))  # noqa: PTH115
            link_source(_copy)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 (no shell on purpose)
