"""torchrun's agent for Tasks on several hosts, whose workers are forks of a process that has imported torch.

torchrun starts an interpreter for each rank, and each one imports torch and the modules behind DDP and every optimizer,
which takes seconds at the start and at each restart. torch documents `SimpleElasticAgent` for agents that start their
workers in another way (docs.pytorch.org/docs/stable/elastic/agent.html, "Extending the Agent"). Rendezvous, restarts
and the exit barrier stay torch's. Decisions 026 and 034 compare this with other ways. A single host needs no rendezvous
and has an agent without torch (host_agent.py).
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

from cloudtrain_runtime.launcher.agent_signals import STOP_SIGNALS, is_asked_to_end
from cloudtrain_runtime.launcher.fork_server import ForkServer
from cloudtrain_runtime.launcher.rank_processes import (
    STOP_SECONDS,
    TASK_PEER_SECONDS,
    Rank,
    RankProcesses,
    log_restart,
    rank_variables,
)

_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)


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
        self._processes = RankProcesses(TASK_PEER_SECONDS)
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
        with self._deferred_signals():
            for worker in worker_group.workers:
                self._error_file(worker.local_rank).unlink(missing_ok=True)
                environ = {**os.environ, **self._variables(worker_group, worker)}
                process = self._server.start_worker(self._script, environ)
                self._processes.add(worker.local_rank, process)
            self.has_started = True
        return self._processes.pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._deferred_signals():
            return self._result(worker_group)

    def _result(self, worker_group: WorkerGroup) -> RunResult:
        if self._processes.have_succeeded:
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        ended = self._processes.end_after_failure()
        if not ended:
            return RunResult(state=WorkerState.HEALTHY)
        failures = {}
        for worker in worker_group.workers:
            if worker.local_rank not in ended:
                continue
            pid, code = ended[worker.local_rank]
            failures[worker.global_rank] = ProcessFailure(
                local_rank=worker.local_rank,
                pid=pid,
                exitcode=code,
                error_file=str(self._error_file(worker.local_rank)),
            )
        if self._restarts < worker_group.spec.max_restarts:
            self._restarts += 1
            codes = {rank: each.exitcode for rank, each in failures.items()}
            log_restart(self._restarts, worker_group.spec.max_restarts, codes)
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _stop_workers(self, worker_group: WorkerGroup, **_: Any) -> None:  # noqa: ARG002 (torch's signature)
        with self._deferred_signals():
            self._processes.end_after_loss()

    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
        """End the workers: after a stop signal, or after an error of this agent if there is none."""
        with self._deferred_signals():
            if death_sig:
                self._processes.end(death_sig, STOP_SECONDS)
            else:
                self._processes.end_after_loss()

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

    def _error_file(self, local_rank: int) -> Path:
        return self._errors / f"{local_rank}.json"

    def _variables(self, group: Any, worker: Worker) -> dict[str, str]:
        """Return the variables of a worker of a group, all of whose fields are set after the rendezvous."""
        spec = group.spec
        return rank_variables(
            Rank(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                role_rank=worker.role_rank,
                world_size=worker.world_size,
                role_world_size=worker.role_world_size,
            ),
            master=(group.master_addr, group.master_port),
            run=spec.rdzv_handler.get_run_id(),
            restarts=(self._restarts, spec.max_restarts),
            error_file=self._error_file(worker.local_rank),
            group=(group.group_rank, group.group_world_size),
            ranks_here=spec.local_world_size,
            role=spec.role,
        )
