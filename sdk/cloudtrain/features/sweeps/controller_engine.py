"""Engine `optuna`: a controller on this machine proposes and submits the trials."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cloudtrain.bundle import Contents
from cloudtrain.client.home import make_home
from cloudtrain.controllers.kept_code import read_code
from cloudtrain.controllers.process import start_controller
from cloudtrain.features.sweeps.controller import Controller
from cloudtrain.features.sweeps.engine import Engine
from cloudtrain.features.sweeps.halving import check_hyperband, lengths_of
from cloudtrain.features.sweeps.planning import EngineRules, SweepPlan
from cloudtrain.features.sweeps.results import SweepState, SweepStatus
from cloudtrain.features.sweeps.shared_copy import SharedSweeps
from cloudtrain.features.sweeps.stored_sweep import (
    SWEEP_FILE,
    SWEEPS_FOLDER,
    StoredSweep,
    identity_of,
)
from cloudtrain.features.sweeps.study import Study, check_optuna
from cloudtrain.runs.run import Run
from cloudtrain.support.backend_facts import backend_option, facts_of

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ControllerEngine(Engine):
    """The controller of a sweep."""

    @property
    def rules(self) -> EngineRules:
        """What the engine means for the plan."""
        return EngineRules(tuple(check_hyperband(self.sweep)), lengths_of(self.sweep))

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks at the sweep, which read the files of the controller."""
        return _POLL_SECONDS

    def find_elsewhere(self, *, new: bool) -> StoredSweep | None:
        """Check Optuna and the backend; return the newest unfinished equal sweep of another machine."""
        check_optuna()
        shared = self._shared_sweeps()
        if new or shared is None:
            return None
        identity = identity_of(self.sweep, self.backend)
        home = self.home or make_home()
        for name in shared.ids():
            if not name.endswith(identity[:6]) or (home / SWEEPS_FOLDER / name).exists():
                continue
            copy = shared.copy_of(name)
            content = copy.read_record(SWEEP_FILE)
            if content is not None and content.get("identity") == identity:
                stored = StoredSweep.adopt(home, content, self.sweep.job.base)
                copy.fetch_state(stored.database)
                if not self.look(stored)[0].state.is_final:
                    return stored
        return None

    def create(self) -> tuple[StoredSweep, SweepPlan]:
        """Plan the sweep; create its folder with the database of its trials and a copy of its code."""
        code = read_code(self.sweep.job, self.client().session.find_home())
        planned = self.plan(code)
        stored = self.store(planned)
        Study(stored).close()
        stored.code.keep(code)
        return stored, planned

    def start(self, stored: StoredSweep, environ: Mapping[str, str], *, new: bool) -> None:  # noqa: ARG002 (for tuning jobs)
        """Start the controller in the background.

        Raises:
            CloudtrainError: It ended at once, or the code of the sweep is not on this machine any more.
        """
        if stored.is_controlled:
            return
        stored.stop_file.unlink(missing_ok=True)
        stored.code.read()
        start_controller(stored, "cloudtrain.features.sweeps", environ)

    def control(
        self,
        stored: StoredSweep,
        report: Callable[[str], None],
        score: Callable[[Run], float] | None,
    ) -> None:
        """Control the sweep in this process until it has ended. If another process does so, do nothing."""
        with contextlib.ExitStack() as stack:
            if not stack.enter_context(stored.lock()):
                return
            code = stored.code.read()
            shared = self._shared_sweeps(code)
            copy = None if shared is None else shared.copy_of(stored.id)
            if copy is not None:
                stack.enter_context(copy.lock())
                copy.fetch_state(stored.database)
            study = stack.enter_context(contextlib.closing(Study(stored)))
            if study.end is not None:
                return
            if copy is not None:
                copy.store_record(stored.folder / SWEEP_FILE)
                copy.store_state(stored.database)
            Controller(
                *(stored, study, code),
                settings=self.settings,
                report=report,
                score=score,
                on_save=lambda: None if copy is None else copy.store_state(stored.database),
            ).run()

    def look(self, stored: StoredSweep) -> tuple[SweepStatus, bool]:
        """Return the recorded status, and whether a controller runs on this machine."""
        with contextlib.closing(Study(stored)) as study:
            # Before the end is read, which a controller may record meanwhile.
            is_controlled = stored.is_controlled
            end, trials = study.end, study.trials()
        pause = stored.read_pause()
        if end is not None:
            state, reason = SweepState(end[0]), end[1]
        elif is_controlled:
            state, reason = SweepState.RUNNING, f"paused: {pause}" if pause else ""
        else:
            state = SweepState.INTERRUPTED
            command = f"cloudtrain sweep run FILE{backend_option(stored.backend)}"
            reason = f"{pause or 'its controller has ended'}; to continue: {command}"
        return SweepStatus.of(stored, state, reason, trials), is_controlled

    def stop(self, stored: StoredSweep) -> None:
        """Ask the controller to stop the runs. Without a controller, this process stops them and waits."""
        stored.stop_file.touch()
        if not stored.is_controlled:
            self.control(stored, lambda _: None, None)

    def has_other_code(self, stored: StoredSweep) -> bool:
        """Return whether the code folder differs from the code of the start."""
        return stored.code.has_changed

    def _shared_sweeps(self, code: Contents | None = None) -> SharedSweeps | None:
        """Return where the account's sweeps are copied to; None for local sweeps.

        Raises:
            CloudtrainError: The backend is not ready, for example because settings are missing.
        """
        opened = self.client(code).backend(self.backend, self.sweep.job)
        if not facts_of(self.backend).uses_account:
            return None
        from cloudtrain.aws.errors import aws_errors
        from cloudtrain.aws.s3_download import make_s3_client_of

        account = opened.target().settings
        with aws_errors("connect to S3"):
            s3 = make_s3_client_of(opened.storage_environ())
        return SharedSweeps(s3, f"s3://{account.bucket}/{account.prefix}")
