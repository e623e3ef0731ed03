"""Process trees: everything that a run has started, found and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
RUN_VARIABLE = "TRAINING_JOB_NAME"
"""SageMaker gives it to every container; every process of a run inherits it."""


def adopt_orphans() -> None:
    """Have orphaned descendants handed to this process, so that none can slip away (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have this process get SIGTERM when its parent dies, so that no host outlives its supervisor (Linux only)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Return all living processes below this one."""
    import psutil

    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def processes_of_run(run: str) -> list[psutil.Process]:
    """Return all processes of this user that carry the run's name, whoever their parent is now."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == run and _is_alive(process):
                found.append(process)
        except psutil.Error:
            continue  # gone, or not ours
    return found


def kill(processes: Iterable[psutil.Process], timeout_seconds: float = 10.0) -> None:
    """SIGKILL processes and wait until they are gone."""
    import psutil

    doomed = list(processes)
    for process in doomed:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed, timeout=timeout_seconds)


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
