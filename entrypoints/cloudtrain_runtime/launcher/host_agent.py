"""The agent of a run with one host: it starts the ranks as torchrun does, without torch.

Several hosts agree on their ranks through torchrun's rendezvous, which needs torch. One host has nothing to agree on, so
its ranks can start at once, while torchrun would still import torch in its agent. Standard library only. Decision 037
compares this with torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Final

from cloudtrain_runtime.contract.constants import OWN_STORE_VARIABLE
from cloudtrain_runtime.contract.run_variables import OF_TORCHRUN
from cloudtrain_runtime.launcher.agent_signals import (
    END_RANKS_SIGNAL,
    STOP_SIGNALS,
    is_asked_to_end,
    note_request,
)
from cloudtrain_runtime.launcher.fork_server import ForkServer
from cloudtrain_runtime.launcher.rank_processes import (
    STOP_SECONDS,
    TASK_PEER_SECONDS,
    FailedProcess,
    NewInterpreter,
    Rank,
    RankProcess,
    RankProcesses,
    log_restart,
    rank_variables,
    read_failure,
)
from cloudtrain_runtime.process.reserved_port import hold_port

_CHECK_SECONDS: Final = 1.0
"""Longest time between two looks at the ranks. Their ends are reported at once."""


@dataclass(frozen=True)
class HostOptions:
    """The arguments of torchrun that a single host uses.

    Attributes:
        ranks: Number of ranks.
        max_restarts: How often they are started again after a failure.
        address: Address of this host.
        run: Id of the run.
        script: The program of each rank.
    """

    ranks: int
    max_restarts: int
    address: str
    run: str
    script: str

    @classmethod
    def of(cls, argv: Sequence[str], environ: Mapping[str, str]) -> HostOptions | None:
        """Return the options of torchrun's arguments; None where only torchrun's own agent can act as they say.

        That is for several hosts, for a number of ranks that torch decides, and for torchrun's settings in the environment.

        Args:
            argv: The arguments.
            environ: The environment of the agent.
        """
        if any(map(_is_setting, environ)):
            return None
        given = dict(argument.partition("=")[::2] for argument in argv[:-1])
        ranks = given["--nproc-per-node"]
        if given["--nnodes"] != "1" or not ranks.isdecimal():
            return None
        return cls(
            ranks=int(ranks),
            max_restarts=int(given["--max-restarts"]),
            address=given["--local-addr"],
            run=given["--rdzv-id"],
            script=argv[-1],
        )


def _is_setting(name: str) -> bool:
    """Return whether a variable is a setting of torchrun, and not one that it sets for ranks."""
    if name.startswith("PET_"):
        return True
    return name.startswith("TORCHELASTIC_") and name not in OF_TORCHRUN


class HostAgent:
    """Starts the ranks, monitors them, starts them again and ends them.

    Args:
        options: What is started.
        server: Forks the ranks of a Task; None for new interpreters.
    """

    def __init__(self, options: HostOptions, server: ForkServer | None = None) -> None:
        self._options = options
        self._server = server
        # A script may take as long as under torchrun.
        peer_seconds = STOP_SECONDS if server is None else TASK_PEER_SECONDS
        self._processes = RankProcesses(peer_seconds)
        self._restarts = 0
        self._received: signal.Signals | None = None
        self._woken, wakes = os.pipe()
        for end in (self._woken, wakes):
            os.set_blocking(end, False)
        os.environ[OWN_STORE_VARIABLE] = "1"
        # A signal and the end of a child end the waits below.
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(END_RANKS_SIGNAL, note_request)
        for number in (*STOP_SIGNALS, signal.SIGQUIT):
            signal.signal(number, self._on_signal)

    def stop_signal(self) -> signal.Signals | None:
        """Return the stop signal by which the run ends; None if its ranks end by themselves."""
        return self._received

    def run(self) -> Mapping[int, FailedProcess]:
        """Run the ranks to their end, with restarts; return the failures of the last attempt by rank.

        Raises:
            ServerLostError: The process that forks the ranks has ended.
        """
        self._wait_for_server()
        with tempfile.TemporaryDirectory(prefix="cloudtrain-errors-") as folder:
            while True:
                failed = self._run_once(Path(folder))
                is_last = self._restarts == self._options.max_restarts
                if not failed or is_last or self.stop_signal() is not None:
                    return failed
                self._restarts += 1
                codes = {rank: each.exitcode for rank, each in failed.items()}
                log_restart(self._restarts, self._options.max_restarts, codes)

    def _wait_for_server(self) -> None:
        """Wait until the server can fork, which takes its imports, or until there is a stop signal."""
        while self._server is not None and not self._server.is_ready():
            if self.stop_signal() is not None:
                return
            self._wait()

    def _run_once(self, folder: Path) -> Mapping[int, FailedProcess]:
        """Start the ranks and wait until all have ended; return those that have failed."""
        if self.stop_signal() is not None:
            return {}
        try:
            self._start_ranks(folder)
            while self.stop_signal() is None and not self._processes.have_succeeded:
                ended = self._processes.end_after_failure()
                if ended:
                    return {
                        rank: read_failure(rank, pid, code, folder / f"{rank}.json")
                        for rank, (pid, code) in ended.items()
                    }
                self._wait()
        finally:
            number = self.stop_signal()
            if number is None:
                # All have ended, unless there was an error of this agent.
                self._processes.end_after_loss()
            else:
                self._processes.end(number, STOP_SECONDS)
        return {}

    def _start_ranks(self, folder: Path) -> None:
        # Rank 0 holds the port itself as soon as it runs, up to the program that it executes.
        with hold_port(0) as held:
            port = held.getsockname()[1]
            if sys.platform != "linux":
                held.close()
            for local_rank in range(self._options.ranks):
                error_file = folder / f"{local_rank}.json"
                error_file.unlink(missing_ok=True)
                process = self._start(local_rank, port, error_file)
                self._processes.add(local_rank, process)

    def _start(self, local_rank: int, port: int, error_file: Path) -> RankProcess:
        options = self._options
        variables = rank_variables(
            Rank(
                rank=local_rank,
                local_rank=local_rank,
                role_rank=local_rank,
                world_size=options.ranks,
                role_world_size=options.ranks,
            ),
            master=(options.address, port),
            run=options.run,
            restarts=(self._restarts, options.max_restarts),
            error_file=error_file,
            ranks_here=options.ranks,
        )
        environ = {**os.environ, **variables}
        if self._server is None:
            return NewInterpreter(options.script, environ)
        return self._server.start_worker(options.script, environ)

    def _wait(self) -> None:
        """Wait for an end of a rank, or a signal."""
        sources: list[Any] = [self._woken]
        if self._server is not None:
            sources.append(self._server.channel)
        wait(sources, _CHECK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Only the launcher, which knows the grace time, ends the ranks.
        if number == signal.SIGQUIT or is_asked_to_end():
            self._received = signal.Signals(number)
