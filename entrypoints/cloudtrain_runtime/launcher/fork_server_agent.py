"""torchrun's agent for Tasks, whose workers are forks of a process that has imported torch (fork_server.py).

torchrun starts an interpreter for each rank, and each one imports torch and the modules behind DDP and every optimizer,
which takes seconds at the start and at each restart. torch documents `SimpleElasticAgent` for agents that start their
workers in another way (docs.pytorch.org/docs/stable/elastic/agent.html, "Extending the Agent"). Rendezvous, restarts
and the exit barrier stay torch's. Decisions 026 and 034 compare this with other ways.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from cloudtrain_runtime.contract import ERROR_FILE_VARIABLE, describe_exit
from cloudtrain_runtime.launcher.agent_signals import STOP_SIGNALS, is_asked_to_end
from cloudtrain_runtime.launcher.fork_server import ForkServer
from cloudtrain_runtime.launcher.fork_server import Worker as WorkerProcess
from cloudtrain_runtime.process.event_log import log_line

_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
_STOP_SECONDS = 30.0
"""How long workers may take to exit after a stop signal, as under torchrun."""

_PEER_SECONDS = 3.0
"""How long workers may take to exit after the loss of a peer: they report an error, or wait in a collective. A Task's
training loop takes SIGTERM for a stop notice, so the signal alone would not end them."""

_KILL_SECONDS = 10.0
"""How long this process waits for workers that it has killed: the kernel may still hold them in a call to a device."""


class ForkServerAgent(SimpleElasticAgent):
    """Starts a script's workers from the fork server, monitors them and ends them.

    Attributes:
        has_started: Whether workers have been started.
    """

    def __init__(self, config: LaunchConfig, script: str, server: ForkServer) -> None:
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        self._rendezvous_handler = get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=script,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
        )
        super().__init__(spec)
        self.has_started = False
        self._script = script
        self._server = server
        self._restarts = 0
        self._processes: dict[int, WorkerProcess] = {}
        self._errors = Path()
        self._is_deferring = False
        self._deferred: int | None = None

    def run_workers(self) -> RunResult | None:
        """Run the workers to their end, with restarts; return the last failures, or None if there are none.

        Raises:
            SignalException: This process has received a stop signal, and the workers have ended.
            RendezvousConnectionError: The first host, which holds the rendezvous store, has ended.
        """
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        with tempfile.TemporaryDirectory(prefix="cloudtrain-errors-") as folder:
            self._errors = Path(folder)
            result: RunResult | None = self.run()
        if result is None:
            # torch has logged why.
            raise RendezvousConnectionError("the other hosts have left the rendezvous")
        self._rendezvous_handler.shutdown()
        return result if result.is_failed() else None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._processes = {}
        with self._deferred_signals():
            for worker in worker_group.workers:
                self._error_file(worker).unlink(missing_ok=True)
                environ = {**os.environ, **self._variables(worker_group, worker)}
                process = self._server.start_worker(self._script, environ)
                self._processes[worker.local_rank] = process
            self.has_started = True
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._deferred_signals():
            return self._result(worker_group)

    def _result(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes
        codes = [process.exit_code for process in processes.values()]
        if all(code == 0 for code in codes):
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        if not any(codes):
            return RunResult(state=WorkerState.HEALTHY)
        self._end_workers(signal.SIGTERM, _PEER_SECONDS)
        # By the codes from before this agent ended the others.
        has_ended = dict(zip(processes, codes, strict=True))
        failures = {}
        for worker in worker_group.workers:
            process = processes[worker.local_rank]
            if process.exit_code == 0:
                continue
            code = -signal.SIGKILL if process.exit_code is None else process.exit_code
            if code == -signal.SIGKILL and not has_ended[worker.local_rank]:
                # As torchrun reports the workers that it ends, which are not the cause.
                code = -signal.SIGTERM
            failures[worker.global_rank] = ProcessFailure(
                local_rank=worker.local_rank,
                pid=process.pid,
                exitcode=code,
                error_file=str(self._error_file(worker)),
            )
        if self._restarts < worker_group.spec.max_restarts:
            self._restarts += 1
            ended = ", ".join(
                f"rank {rank} by {describe_exit(each.exitcode)}" for rank, each in failures.items()
            )
            log_line(f"restart {self._restarts} of {worker_group.spec.max_restarts}: {ended}")
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _stop_workers(self, worker_group: WorkerGroup, **_: Any) -> None:  # noqa: ARG002 (torch's signature)
        with self._deferred_signals():
            self._end_workers(signal.SIGTERM, _PEER_SECONDS)

    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
        """End the workers: after a stop signal, or after an error of this agent if there is none."""
        seconds = _STOP_SECONDS if death_sig else _PEER_SECONDS
        with self._deferred_signals():
            self._end_workers(death_sig or signal.SIGTERM, seconds)

    def _end_workers(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to the workers that run, and kill those that remain after so many seconds."""
        for process in self._processes.values():
            # Data loaders of a dead rank hold its connections open, so the other ranks would not
            # notice its death.
            if process.exit_code:
                _signal_group(process, signal.SIGKILL)
        running = [process for process in self._processes.values() if process.exit_code is None]
        for process in running:
            _signal_group(process, number)
        _join(running, seconds)
        for process in running:
            if process.exit_code != 0:
                _signal_group(process, signal.SIGKILL)
        _join(running, _KILL_SECONDS)
        self._processes = {}

    def _on_signal(self, number: int, _: FrameType | None = None) -> None:
        if number in STOP_SIGNALS and not is_asked_to_end():
            return
        if self._is_deferring:
            self._deferred = number
        else:
            received = signal.Signals(number)
            raise SignalException(f"process {os.getpid()} received {received.name}", received)

    @contextmanager
    def _deferred_signals(self) -> Iterator[None]:
        """Raise a stop signal's exception only after a block.

        In its middle, the exception could leave workers that nothing ends, or half of the server's answer unread.
        """
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        if self._deferred is not None:
            number = self._deferred
            self._deferred = None
            self._on_signal(number)

    def _error_file(self, worker: Worker) -> Path:
        return self._errors / f"{worker.local_rank}.json"

    def _variables(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """Return the variables that torchrun documents for each worker."""
        spec = group.spec
        values = {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "GROUP_RANK": group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
            ERROR_FILE_VARIABLE: self._error_file(worker),
        }
        return {name: str(value) for name, value in values.items()}


def _join(processes: Sequence[WorkerProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _signal_group(process: WorkerProcess, number: signal.Signals) -> None:
    pid = process.pid
    with suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            # It does not lead a group yet, or has ended.
            if process.exit_code is None:
                os.kill(pid, number)
