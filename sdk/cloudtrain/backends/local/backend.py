"""The local backend: runs the request document on this machine like SageMaker's containers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.container.artifacts import describe_unstored
from cloudtrain.backends.container.background import start_background
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.machine import this_machine, visible_gpus
from cloudtrain.backends.container.run_folders import START_SECONDS, RunFolders, last_line, modified
from cloudtrain.backends.container.state_file import (
    STATE_FILE,
    RecordedState,
    find_supervisor,
    is_watched,
    read_state,
    write_state,
)
from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import (
    CloudtrainError,
    MissingExtraError,
    UnreadableStateError,
    UserError,
)
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.secrets import check_local_secrets
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import REPORT_VARIABLE, Settings
from cloudtrain.support.backend_facts import MACHINE_BACKEND
from cloudtrain.support.home_folder import find_owner
from cloudtrain.support.installation import require_local_modules
from cloudtrain.support.steps import Steps
from cloudtrain_runtime.contract import GRACE_VARIABLE

if TYPE_CHECKING:
    from cloudtrain.support.checks import Check

SUPERVISOR_LOG = "supervisor.log"
_POLL_SECONDS = 0.1


class LocalBackend(RunFolders):
    """Runs below `<home>/runs/<run>/`.

    Args:
        home: Folder of local runs.
        load_settings: Returns the account's settings.
        installs: Whether runs use an environment with their requirements.
        cuda_on_cpu: Whether runs use a stand-in for CUDA.
        steps: Receives what takes long: the installation of requirements.
    """

    name = MACHINE_BACKEND
    folder_hint = "choose another folder for local runs: CLOUDTRAIN_HOME"
    log_poll_seconds = 0.02
    is_configured = True
    capacity_pause_seconds = 1.0

    def __init__(
        self,
        home: Path,
        load_settings: Callable[[], Settings] = Settings,
        *,
        installs: bool = False,
        cuda_on_cpu: bool = False,
        steps: Steps | None = None,
    ) -> None:
        super().__init__(home / "runs", load_settings)
        self.home = home
        self._steps = steps or Steps()
        self._options = {"installs": installs, "cuda_on_cpu": cuda_on_cpu}

    def target(self) -> LocalTarget:
        """Return this machine as the target of a plan."""
        return LocalTarget(self.load_settings(), self.home, this_machine(), **self._options)

    def for_previous(self, previous: PreviousRun) -> LocalBackend:
        """Return a local backend with the options of the run: --install, and --cuda-on-cpu without GPUs."""
        installs = JobFolder(self.runs / previous.run).interpreter.is_file()
        is_simulated = (
            bool(self.plan_of(previous.run).get("config", {}).get("cuda_on_cpu"))
            and not visible_gpus()
        )
        return LocalBackend(
            self.home,
            self.load_settings,
            installs=installs,
            cuda_on_cpu=is_simulated,
            steps=self._steps,
        )

    def check_ready(self) -> None:
        """Check that local runs can start on this machine.

        Raises:
            MissingExtraError: torch, psutil or numpy is not installed; or pip, if runs install.
            UserError: The grace period in the environment is no number.
        """
        require_local_modules("local runs")
        if self._options["installs"] and importlib.util.find_spec("pip") is None:
            raise MissingExtraError(
                "--install needs pip in this environment", f"{sys.executable} -m ensurepip"
            )
        grace = os.environ.get(GRACE_VARIABLE, "0")
        if not grace.replace(".", "", 1).isdigit():
            raise UserError(f"{GRACE_VARIABLE}: expected seconds, got {grace!r}", "for example 120")

    def start_checks(self, plan: Plan, *, skip: bool = False) -> Callable[[], tuple[Check, ...]]:
        """Check the checkpoints that a plan would continue from, and its secrets. Nothing takes long here.

        Raises:
            UserError: They do not exist, or are another training's; or a secret is neither set here nor readable.
            CloudError: They are in S3, which refused or cannot be reached.
        """
        del skip
        self.check_continuation(plan)
        check_local_secrets(plan.config.secrets, os.environ)
        return tuple

    def find_active_run(self, plan: Plan) -> None:  # noqa: ARG002 (local runs cost nothing)
        """Return None: each submit starts a run."""
        return

    def submit(
        self,
        plan: Plan,
        bundle: Bundle | None,
        *,
        is_new: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Run:
        """Create the run's folder and start its supervisor.

        Raises:
            UserError: The folder cannot be created, the code of an earlier run was deleted, or pip failed.
        """
        # Each submit starts a run, and copies nothing.
        del is_new, progress
        if bundle is None:
            self.require_code(plan)
        python = self.install(plan, self._steps) if self._options["installs"] else None
        folder = self.create_folder(plan, python=python)
        self._start(folder)
        return Run(plan.run, self)

    def _start(self, folder: Path) -> None:
        """Start the supervisor of a run and wait until it has recorded its process id.

        Raises:
            CloudtrainError: The supervisor ended at once, or did not start in time.
        """
        try:
            start_background(
                "the local backend",
                ["cloudtrain.backends.container", str(folder)],
                folder / SUPERVISOR_LOG,
                lambda _: read_state(folder).supervisor is not None,
                limit_seconds=START_SECONDS,
                cwd=folder,
                env={**os.environ, REPORT_VARIABLE: str(int(self.load_settings().report))},
            )
        except CloudtrainError:
            # A full disk, which the error names.
            with contextlib.suppress(OSError):
                write_state(folder, RecordedState(State.FAILED, "the local backend did not start"))
            raise

    def billing(self, run: str) -> Billing:  # noqa: ARG002 (local runs cost nothing)
        """Return that nothing is billed."""
        return Billing()

    def record_of(self, folder: Path) -> RecordedState:
        """Return the recorded state, or FAILED if the supervisor has died."""
        seen = read_state(folder)
        # The order matters: the supervisor takes its lock before it records its process id, and records its final state
        # before it ends.
        if seen.state.is_final or is_watched(folder):
            return seen
        record = read_state(folder)
        # The supervisor has started between the two reads.
        has_started = seen.supervisor is None and record.supervisor is not None
        last_write = max(modified(path) for path in (folder / STATE_FILE, JobFolder(folder).events))
        is_starting = record.supervisor is None and time.time() - last_write < START_SECONDS
        if record.state.is_final or has_started or is_starting:
            return record
        last = last_line(folder / SUPERVISOR_LOG)
        if record.ending is not None:
            why = ["the supervisor died while it stored them"]
            return record.but(
                state=record.ending,
                ending=None,
                ended=datetime.fromtimestamp(last_write, UTC),
                unstored=describe_unstored(record.ending, why, folder.name),
            )
        reason = "the supervisor of this run died (killed, or the machine restarted)"
        reason += f"; the last line of its log: {last}" if last else ""
        return record.but(
            state=State.FAILED, reason=reason, ended=datetime.fromtimestamp(last_write, UTC)
        )

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status. They are constant, because reading a folder is cheap."""
        return Backoff(_POLL_SECONDS, _POLL_SECONDS)

    def stop(self, run: str) -> None:
        """Ask the supervisor to stop the run; without a supervisor, kill its remaining processes.

        It works with a damaged state.json and on a full disk, too.

        Raises:
            UserError: the run belongs to another user.
        """
        folder = self.folder_of(run)
        try:
            record = read_state(folder)
        except UnreadableStateError:
            record = None
        if record is not None and record.state.is_final:
            return
        if is_watched(folder):
            self._end_supervisor(folder, record)
            return
        from cloudtrain.backends.container.process_tree import kill, processes_of_run

        kill(processes_of_run(run))
        if record is not None:
            # A reader derives the same state.
            with contextlib.suppress(OSError):
                write_state(folder, self.record_of(folder))

    def _end_supervisor(self, folder: Path, record: RecordedState | None) -> None:
        supervisor = find_supervisor(folder) or (record.supervisor if record is not None else None)
        if not supervisor:
            raise UserError(
                f"{folder}: the supervisor's process id is unknown", "look for it with: ps -ef"
            )
        try:
            os.kill(supervisor, signal.SIGTERM)
        except PermissionError:
            raise UserError(
                f"{folder.name} belongs to {find_owner(folder)}", "only that user can stop it"
            ) from None
        except (ProcessLookupError, OverflowError):
            # The supervisor has just ended.
            return
