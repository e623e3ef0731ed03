"""A fourth backend, for tests: the script of a job as one plain process, without instances and without /opt/ml.

It shows what a new backend needs: this package, and an entry in `cloudtrain.support.backend_facts`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.base import OnlyRuns
from cloudtrain.backends.container.machine import this_machine
from cloudtrain.backends.context import BackendContext
from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import RunNotFoundError, UserError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.downloads import RunStorage
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.support.backend_facts import BackendFacts
from cloudtrain.support.run_id import submitted_at
from cloudtrain_runtime.contract.file_uri import path_of

FACTS = BackendFacts(
    name="plain",
    package="support.plain_backend",
    option="--backend plain",
    uses_account=False,
    is_on_this_machine=True,
    is_billed=False,
)


class PlainTarget(LocalTarget):
    """This machine, under the name of this backend."""

    name = FACTS.name


class PlainBackend(OnlyRuns):
    """Runs below `<home>/plain/<run>/`: plan.json, log, process, and code when the process has ended."""

    name = FACTS.name
    capacity_pause_seconds = 1.0
    is_configured = True

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._runs = context.home / "plain"

    def target(self) -> PlainTarget:
        return PlainTarget(self._context.load_settings(), self._context.home, this_machine())

    def for_previous(self, previous: PreviousRun) -> PlainBackend:
        return self

    def check_ready(self) -> None:
        return

    def start_checks(self, plan: Plan, *, skip: bool = False) -> Callable[[], tuple[()]]:
        return tuple

    def check_resume(self, plan: Plan) -> tuple[()]:
        CheckpointFolder(
            plan.resume, plan.config.checkpoint.resume_run, self.storage_environ()
        ).find()
        return ()

    def find_active_run(self, plan: Plan) -> None:
        return

    def submit(
        self,
        plan: Plan,
        bundle: Bundle | None,
        *,
        is_new: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Run:
        folder = self._runs / plan.run
        (code := folder / "files").mkdir(parents=True)
        (folder / "output" / "model").mkdir(parents=True)
        archive = path_of(plan.locations.code)
        if not archive.is_file():
            raise UserError(f"the code of the earlier run was deleted: {archive}")
        subprocess.run(["tar", "-xzf", str(archive)], cwd=code, check=True)
        (folder / "plan.json").write_text(plan.to_file())
        (folder / "log").touch()
        script = shlex.join([sys.executable, str(plan.config.script), *map(str, plan.config.args)])
        ends = "trap 'trap - TERM; echo 143 > ../code; kill 0' TERM"
        line = f"export SM_MODEL_DIR=../output/model; {ends}; ({script}) > ../log 2>&1 & wait $!; echo $? > ../code"
        process = subprocess.Popen(["/bin/sh", "-c", line], cwd=code, start_new_session=True)
        (folder / "process").write_text(str(process.pid))
        process.returncode = 0  # it outlives this process
        return Run(plan.run, self)

    def _folder(self, run: str) -> Path:
        if not self.may_have(run):
            raise RunNotFoundError(f"there is no plain run {run}", "see: cloudtrain list")
        return self._runs / run

    def may_have(self, run: str) -> bool:
        return (self._runs / run / "process").exists()

    def status(self, run: str) -> Status:
        folder = self._folder(run)
        code = (folder / "code").read_text().strip() if (folder / "code").exists() else ""
        state = {"": State.RUNNING, "0": State.SUCCEEDED, "143": State.STOPPED}.get(
            code, State.FAILED
        )
        reason = f"exit code {code}" if state is State.FAILED else ""
        ended = datetime.fromtimestamp((folder / "code").stat().st_mtime, UTC) if code else None
        return Status(
            run, self.name, state, reason, created=submitted_at(run), ended=ended, cost_usd=0.0
        )

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: object = None,
    ) -> Iterator[LogLine]:
        if follow:
            Run(run, self).wait()
        lines = (self._folder(run) / "log").read_text().splitlines()
        return filter(only.wants, (LogLine("algo-1", line, time.time()) for line in lines))

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        runs = (entry.name for entry in self._runs.glob("*") if self.may_have(entry.name))
        return filter(wanted.accepts, map(self.status, sorted(runs, reverse=True)))

    def billing(self, run: str) -> Billing:
        return Billing()

    def facts(self, run: str) -> Mapping[str, str]:
        return {}

    def plan_of(self, run: str) -> Mapping[str, Any]:
        return dict(json.loads((self._folder(run) / "plan.json").read_text()))

    def stop(self, run: str) -> None:
        if not self.status(run).state.is_final:
            os.kill(int((self._folder(run) / "process").read_text()), signal.SIGTERM)

    def poll_backoff(self) -> Backoff:
        return Backoff(0.1, 0.1)

    def end_warm_pool(self, run: str) -> None:
        raise UserError(f"{run} has no warm pool")

    def storage_environ(self) -> Mapping[str, str]:
        return os.environ

    def storage_of(self, run: str) -> RunStorage:
        return RunStorage(str(self._folder(run) / "output"), os.environ, dict)


def make_target(context: BackendContext) -> PlainTarget:
    return PlainBackend(context).target()


def open_backend(context: BackendContext) -> PlainBackend:
    return PlainBackend(context)


def find_backends(context: BackendContext) -> Iterator[PlainBackend]:
    yield PlainBackend(context)
