"""Processes in sessions of their own, whose output is in a log: those of jobs, and those that outlive a command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from cloudtrain.backends.container.machine import is_disk_full
from cloudtrain.errors import CloudtrainError, UserError
from cloudtrain.support.units import format_duration

_POLL_SECONDS = 0.01
_TAIL_BYTES = 2000
T = TypeVar("T")


def start_logged(
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which appends its output to a log."""
    with log.open("ab") as out:
        return subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env=env,
            preexec_fn=preexec_fn,  # noqa: PLW1509 (one system call, in a process of one thread)
        )


def start_background(
    name: str,
    module: Sequence[str],
    log: Path,
    find: Callable[[int | None], T | None],
    *,
    limit_seconds: float = 60.0,
    is_elsewhere: Callable[[], bool] = lambda: False,
    error: type[CloudtrainError] = CloudtrainError,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> T:
    """Start a Python module that outlives this process, wait until it is ready, and return what `find` found.

    Args:
        name: What it is, for errors.
        module: The module and its arguments.
        log: File for its output.
        find: Returns something true when it is ready; called with its exit code, which is None while it runs.
        limit_seconds: The longest wait, after which it is killed.
        is_elsewhere: Whether another process is about to be ready in its place, so that it may end.
        error: Kind of the error.
        cwd: Its folder.
        env: Its environment; by default that of this process.

    Raises:
        UserError: It did not start, because the disk is full.
        CloudtrainError: It did not start; the message has the end of what it has written.
    """
    begin = log.stat().st_size if log.exists() else 0
    process = start_logged([sys.executable, "-P", "-m", *module], log, cwd=cwd, env=env)
    deadline = time.monotonic() + limit_seconds
    while not (found := find(process.poll())):
        is_late = time.monotonic() > deadline
        if not is_late and (process.poll() is None or is_elsewhere()):
            time.sleep(_POLL_SECONDS)
            continue
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if is_disk_full(log.parent):
            raise UserError(
                f"{name} did not start: the disk is full ({log.parent})",
                "free disk space, or set CLOUDTRAIN_HOME",
            )
        late = f" within {format_duration(limit_seconds)}" if is_late else ""
        raise error(f"{name} did not start{late}:\n{_end_of(log, begin)}", f"see {log}")
    # The process outlives this one. With a return code, Popen does not warn that it is still running.
    process.returncode = 0
    return found


def _end_of(log: Path, begin: int) -> str:
    """Return the end of what was written into a log since it had `begin` bytes."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace").strip()
