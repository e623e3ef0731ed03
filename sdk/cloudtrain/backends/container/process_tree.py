"""Process trees: find and kill the processes of a run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain_runtime.contract import INSTANCE_VARIABLE

if TYPE_CHECKING:
    import psutil

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
RUN_VARIABLE = "TRAINING_JOB_NAME"
"""SageMaker sets it in every container. Every process of a run inherits it."""


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it finds all of them (Linux only)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, so that no host outlives its supervisor (Linux only)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def wait_for_end(children: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until one of these children has ended, for so many seconds at most.

    Where the system or the interpreter gives no descriptors of processes, such as before Linux 5.3, it always waits so long.
    """
    if sys.platform != "linux":
        time.sleep(seconds)
        return
    with contextlib.ExitStack() as stack:
        poller = select.poll()
        for child in children:
            try:
                descriptor = os.pidfd_open(child.pid)
            except (AttributeError, OSError):
                time.sleep(seconds)
                return
            stack.callback(os.close, descriptor)
            poller.register(descriptor, select.POLLIN)
        poller.poll(seconds * 1000)


def descendants() -> list[psutil.Process]:
    """Return all living descendants of this process."""
    import psutil

    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def processes_of_host(root: Path) -> list[psutil.Process]:
    """Return this process's descendants that belong to the host with this /opt/ml."""
    import psutil

    found = []
    for process in descendants():
        # The process has ended.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(INSTANCE_VARIABLE) == str(root):
                found.append(process)
    return found


def processes_of_run(run: str) -> list[psutil.Process]:
    """Return all processes of this user with the run's name in their environment."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(RUN_VARIABLE) == run
                and _is_alive(process)
            ):
                found.append(process)
        except psutil.Error:
            # It has ended, or belongs to another user.
            continue
    return found


def kill(processes: Iterable[psutil.Process], timeout_seconds: float = 10.0) -> None:
    """Send SIGKILL to processes and wait until they have ended."""
    import psutil

    remaining = list(processes)
    for process in remaining:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(remaining, timeout=timeout_seconds)


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
