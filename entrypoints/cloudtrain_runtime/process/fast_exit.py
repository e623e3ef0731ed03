"""Exit of a process without the interpreter's shutdown, which destroys what torch's threads still use."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

_DAEMON_SECONDS = 5.0
"""How long a daemon process may take to end before it is killed."""


@dataclass
class _State:
    is_registered: bool = False
    exit_code: int | None = None
    on_success: Callable[[], None] | None = None


_state = _State()


def register(on_success: Callable[[], None] | None = None) -> None:
    """Register the exit handler that `exit_process` needs. Handlers that are registered later run before it.

    `on_success` is called last before an exit with code 0.
    """
    _state.on_success = on_success
    if not _state.is_registered:
        _state.is_registered = True
        atexit.register(_end)


def exit_process(exit_code: int) -> NoReturn:
    """End this process: join threads, run exit handlers, flush files, and skip the rest of the shutdown.

    Unlike `sys.exit` it does not unwind the stack, which would destroy objects, and it runs exit handlers in a process
    of multiprocessing, too.
    """
    _state.exit_code = exit_code
    ctypes.pythonapi.Py_Exit(exit_code)
    # Not reached: Py_Exit does not return.
    raise SystemExit(exit_code)


def _end() -> None:
    if _state.exit_code is None:
        # The process ends in another way.
        return
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
            child.join(_DAEMON_SECONDS)
            child.kill()
        child.join()
    if _state.exit_code == 0 and _state.on_success is not None:
        _state.on_success()
    # The shutdown would have flushed files that are still open.
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_state.exit_code)
