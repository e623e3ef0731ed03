"""Linux process features that Python does not expose."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_PR_SET_PDEATHSIG = 1  # linux/prctl.h, as are the next ones
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36
_NO_FILE = 0xFFFFFFFF

_STAT_FIELDS: Final = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}
"""Positions of the fields in /proc/PID/stat, counted from 1 (proc_pid_stat(5))."""

_shown: list[ctypes.Array[ctypes.c_char]] = []
"""Memory that /proc shows must live as long as the process."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end it at once if the parent has ended already.

    Args:
        parent: The parent's process id, from before the fork.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def child_subreaper() -> Iterator[None]:
    """Make this process adopt orphaned descendants in this block, instead of PID 1."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt its grandchildren")
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0)


def count_threads() -> int:
    """Return the number of threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def set_proc_cmdline(argv: list[str], environ: Mapping[str, str]) -> None:
    """Set the arguments and the environment that /proc shows for this process, for ps and py-spy.

    Without it, a forked process shows those of its ancestor that called exec. A kernel without support
    (CONFIG_CHECKPOINT_RESTORE, Linux 3.18) ignores the call.
    """
    arguments = b"".join(os.fsencode(argument) + b"\0" for argument in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    memory = ctypes.create_string_buffer(arguments + variables)
    start = ctypes.addressof(memory)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    values = {name: int(fields[number - 3]) for name, number in _STAT_FIELDS.items()}
    sbrk: Any = _libc().sbrk
    sbrk.restype = ctypes.c_void_p
    layout = _Layout(
        **values,
        brk=sbrk(0),
        arg_start=start,
        arg_end=start + len(arguments),
        env_start=start + len(arguments),
        env_end=start + len(arguments) + len(variables),
        exe_fd=_NO_FILE,
    )
    _shown.append(memory)
    _prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(layout), ctypes.sizeof(layout))


class _Layout(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        ("start_code", ctypes.c_uint64),
        ("end_code", ctypes.c_uint64),
        ("start_data", ctypes.c_uint64),
        ("end_data", ctypes.c_uint64),
        ("start_brk", ctypes.c_uint64),
        ("brk", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),
        ("arg_start", ctypes.c_uint64),
        ("arg_end", ctypes.c_uint64),
        ("env_start", ctypes.c_uint64),
        ("env_end", ctypes.c_uint64),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def _prctl(option: int, *values: int) -> int:
    padded = (*values, 0, 0, 0, 0)[:4]
    return int(_libc().prctl(option, *(ctypes.c_ulong(value) for value in padded)))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
