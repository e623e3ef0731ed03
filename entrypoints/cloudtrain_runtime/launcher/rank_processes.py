"""The processes of one host's ranks: their variables, their ends and their failures. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from cloudtrain_runtime.contract import ERROR_FILE_VARIABLE, describe_exit
from cloudtrain_runtime.contract.strict_json import load_json
from cloudtrain_runtime.process.event_log import log_line

STOP_SECONDS: Final = 30.0
"""How long ranks may take to exit after a stop signal, as under torchrun."""

TASK_PEER_SECONDS: Final = 3.0
"""How long a Task's ranks may take to exit after the loss of a peer: they report an error, or wait in a collective. The
training loop takes SIGTERM for a stop notice, so the signal alone would not end them."""

KILL_SECONDS: Final = 10.0
"""How long the agent waits for ranks that it has killed: the kernel may still hold them in a call to a device."""

_PYTHON_VARIABLE = "PYTHON_EXEC"
"""Variable of torchrun: the interpreter of new workers."""


class RankProcess(Protocol):
    """A process that runs a rank. It leads a session and a process group of its own."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""

    def join(self, seconds: float) -> None:
        """Wait so long for its end."""


class NewInterpreter:
    """A rank in an interpreter of its own, as torchrun starts it."""

    def __init__(self, script: str, environ: Mapping[str, str]) -> None:
        python = environ.get(_PYTHON_VARIABLE, sys.executable)
        self._process = subprocess.Popen(
            [python, "-u", script], env=dict(environ), start_new_session=True
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        return self._process.poll()

    def join(self, seconds: float) -> None:
        """Wait so long for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


@dataclass(frozen=True)
class Rank:
    """A rank and its place."""

    rank: int
    local_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


@dataclass(frozen=True)
class FailedProcess:
    """How the process of a rank has failed.

    Attributes:
        local_rank: Index of the rank on its host.
        pid: Its process id.
        exitcode: Its exit code, negative for the signal that ended it.
        error_file_data: The content of its error file, any JSON; None if it has written none.
        timestamp: Time at which this was recorded, in seconds since the epoch.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file_data: Any
    timestamp: float


def rank_variables(
    rank: Rank,
    *,
    master: tuple[str, int],
    run: str,
    restarts: tuple[int, int],
    error_file: Path,
    group: tuple[int, int] = (0, 1),
    ranks_here: int,
    role: str = "default",
) -> dict[str, str]:
    """Return the variables that torchrun documents for each worker.

    Args:
        rank: The rank.
        master: Address and port of the store of rank 0.
        run: Id of the run.
        restarts: Number of restarts so far, and at most.
        error_file: File for its error.
        group: Index of this host, and number of hosts.
        ranks_here: Number of ranks of this host.
        role: torchrun's name of the ranks.
    """
    values = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.local_rank,
        "GROUP_RANK": group[0],
        "ROLE_RANK": rank.role_rank,
        "ROLE_NAME": role,
        "WORLD_SIZE": rank.world_size,
        "LOCAL_WORLD_SIZE": ranks_here,
        "GROUP_WORLD_SIZE": group[1],
        "ROLE_WORLD_SIZE": rank.role_world_size,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RESTART_COUNT": restarts[0],
        "TORCHELASTIC_MAX_RESTARTS": restarts[1],
        "TORCHELASTIC_RUN_ID": run,
        # A store that outlives the ranks' groups makes later ones read the addresses of earlier
        # ones (pytorch#135712).
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ERROR_FILE_VARIABLE: error_file,
    }
    return {name: str(value) for name, value in values.items()}


class RankProcesses:
    """The processes of this host's ranks.

    Args:
        peer_seconds: How long ranks may take to exit after the loss of a peer.
    """

    def __init__(self, peer_seconds: float) -> None:
        self._peer_seconds = peer_seconds
        self._processes: dict[int, RankProcess] = {}

    def add(self, local_rank: int, process: RankProcess) -> None:
        """Add the process of a rank that was started."""
        self._processes[local_rank] = process

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    @property
    def have_succeeded(self) -> bool:
        """Whether all of them have ended with exit code 0."""
        return all(process.exit_code == 0 for process in self._processes.values())

    def end_after_failure(self) -> dict[int, tuple[int, int]]:
        """If one has failed, end the others; return process id and exit code of each that has not succeeded.

        Returns:
            By local rank; empty if none has failed.
        """
        processes = dict(self._processes)
        # By the codes from before this agent ends the others.
        codes = {local_rank: process.exit_code for local_rank, process in processes.items()}
        if not any(codes.values()):
            return {}
        self.end(signal.SIGTERM, self._peer_seconds)
        failed = {}
        for local_rank, process in processes.items():
            if process.exit_code == 0:
                continue
            code = -signal.SIGKILL if process.exit_code is None else process.exit_code
            if code == -signal.SIGKILL and not codes[local_rank]:
                # As torchrun reports the workers that it ends, which are not the cause.
                code = -signal.SIGTERM
            failed[local_rank] = (process.pid, code)
        return failed

    def end_after_loss(self) -> None:
        """End those that run, which may wait for a peer that is gone."""
        self.end(signal.SIGTERM, self._peer_seconds)

    def end(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to those that run, and kill those that remain after so many seconds."""
        running = []
        for process in self._processes.values():
            code = process.exit_code
            if code is None:
                running.append(process)
            elif code != 0:
                _kill_rest(process)
        for process in running:
            _signal_group(process, number)
        remaining = _join(running, seconds)
        for process in remaining:
            _signal_group(process, signal.SIGKILL)
        _join(remaining, KILL_SECONDS)
        self._processes = {}


def log_restart(restart: int, most: int, codes: Mapping[int, int]) -> None:
    """Print why ranks are started again.

    Args:
        restart: Number of the restart, from 1 on.
        most: Number of restarts at most.
        codes: Exit codes by rank.
    """
    ended = ", ".join(f"rank {rank} by {describe_exit(code)}" for rank, code in codes.items())
    log_line(f"restart {restart} of {most}: {ended}")


def read_failure(local_rank: int, pid: int, code: int, error_file: Path) -> FailedProcess:
    """Return how a rank has failed, with what it has written to its error file."""
    content = None
    # Any program may have written the file.
    with contextlib.suppress(OSError, ValueError):
        content = load_json(error_file.read_text(encoding="utf-8"))
    return FailedProcess(
        local_rank=local_rank,
        pid=pid,
        exitcode=code,
        error_file_data=content,
        timestamp=time.time(),
    )


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the group of a process that runs, or to the process alone if it does not lead a group yet."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def _join(processes: Sequence[RankProcess], seconds: float) -> list[RankProcess]:
    """Wait so long for the ends of processes; return those that still run. What the others leave in their groups ends."""
    remaining = []
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        code = process.exit_code
        if code is None:
            remaining.append(process)
        elif code != 0:
            _kill_rest(process)
    return remaining


def _kill_rest(process: RankProcess) -> None:
    """Kill the children of a rank whose failure was just seen.

    Data loaders of a dead rank hold its connections open, so the other ranks would not notice its death. Later, its id
    may belong to another process.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_group(process: RankProcess, number: signal.Signals) -> None:
    if process.exit_code is None:
        signal_group(process.pid, number)
    else:
        _kill_rest(process)
