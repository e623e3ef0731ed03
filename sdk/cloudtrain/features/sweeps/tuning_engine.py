"""Engine `sagemaker`: a tuning job of SageMaker proposes, starts and ranks the trials, without a controller.

The name of the tuning job follows from the sweep and its code, and AWS accepts a name only once. So a repeated start,
from any machine, finds the tuning job of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.base import TuningService, TuningTrial
from cloudtrain.backends.context import BackendContext
from cloudtrain.backends.registry import backend_package
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.submission import raise_failed
from cloudtrain.errors import UserError
from cloudtrain.features.sweeps.engine import Engine
from cloudtrain.features.sweeps.planning import EngineRules, SweepPlan
from cloudtrain.features.sweeps.results import SweepState, SweepStatus
from cloudtrain.features.sweeps.spec import HYPERBAND
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.features.sweeps.tuning_request import (
    TuningPlan,
    check_tuning,
    render_tuning,
    searched_values,
)
from cloudtrain.job.job_fields import SWEEP_TAG
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.status import State
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.contract.trial import TrialError, read_values

if TYPE_CHECKING:
    from cloudtrain.bundle.archive import Bundle

TUNING_FILE = "tuning.json"
_FINAL = ("Completed", "Failed", "Stopped")
_STOPS = ("Stopping", "Stopped")
_MOST_ATTEMPTS = 1000
_POLL_SECONDS = 1.0
_AWS_POLL_SECONDS = 30.0
_STATES = {
    "InProgress": SweepState.RUNNING,
    "Stopping": SweepState.RUNNING,
    "Completed": SweepState.SUCCEEDED,
    "Failed": SweepState.FAILED,
    "Stopped": SweepState.STOPPED,
}


@dataclass(frozen=True)
class TuningEngine(Engine):
    """The tuning job of a sweep."""

    @property
    def rules(self) -> EngineRules:
        """What the engine means for the plan: SageMaker chooses rungs and values, and starts all trials."""
        if facts_of(self.backend).uses_account:
            problems = check_tuning(self.sweep)
        else:
            message = (
                f"a tuning job runs on SageMaker or in the sandbox, not {place_name(self.backend)}"
            )
            hint = "use engine: optuna, or --sandbox"
            problems = [self.sweep.problem(("engine",), message, hint)]
        return EngineRules(tuple(problems), (), repeats_values=True, starts_all=True)

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks at the sweep, each of which calls AWS."""
        return _AWS_POLL_SECONDS if facts_of(self.backend).is_billed else _POLL_SECONDS

    def find_elsewhere(self, *, new: bool) -> StoredSweep | None:  # noqa: ARG002 (for controllers)
        """Return None: the name of a tuning job finds that of another machine."""
        return None

    def create(self) -> tuple[StoredSweep, SweepPlan]:
        """Plan the sweep, check that the backend is ready, and create the sweep's folder."""
        planned = self.plan()
        self.client().backend(self.backend, self.sweep.job)
        return self.store(planned), planned

    def start(self, stored: StoredSweep, environ: Mapping[str, str], *, new: bool) -> None:  # noqa: ARG002 (for controllers)
        """Check the account, upload the code and create the tuning job, unless it exists.

        Raises:
            CloudError: A check failed, or AWS refused; nothing was created.
            SpecError: The job, or the request of its tuning job, is not valid.
        """
        client = self.client()
        opened = client.backend(self.backend, self.sweep.job)
        service = opened.tuning_jobs()
        name, _ = _read_record(stored)
        if name and service.describe(name) is not None:
            return
        plan = client.planner(self.sweep.job, backend=self.backend)(self.sweep.job)
        tuning, is_known = self._choose(service, plan, new=new)
        _write_record(stored, tuning)
        if is_known:
            return
        wait_for_checks = opened.start_checks(tuning.plan)
        bundle = self._pack(stored.home)
        raise_failed(wait_for_checks())
        tag = {"Key": SWEEP_TAG, "Value": stored.id}
        of_trials = {**tuning.plan.request, "Tags": [*tuning.plan.request["Tags"], tag]}
        service.create(
            {**tuning.request, "Tags": [*tuning.request["Tags"], tag]},
            dataclasses.replace(tuning.plan, request=of_trials),
            bundle,
        )

    def _choose(self, service: TuningService, plan: Plan, *, new: bool) -> tuple[TuningPlan, bool]:
        """Return the tuning job to create, or the unfinished one of an equal sweep, and whether it exists."""
        for attempt in range(1, _MOST_ATTEMPTS):
            tuning = render_tuning(self.sweep, plan, attempt=attempt)
            found = service.describe(tuning.name)
            if found is None:
                return tuning, False
            if found["HyperParameterTuningJobStatus"] not in _FINAL and not new:
                return tuning, True
        raise UserError(f"this sweep was started {_MOST_ATTEMPTS} times", "change its name")

    def _pack(self, home: Path) -> Bundle:
        from cloudtrain.bundle import BUNDLES_FOLDER, collect
        from cloudtrain.bundle.archive import write_bundle

        job = self.sweep.job
        code = collect(job.code_directory, job.includes, home=home)
        return write_bundle(code, home / BUNDLES_FOLDER)

    def look(self, stored: StoredSweep) -> tuple[SweepStatus, bool]:
        """Return the status of the tuning job and its trials, and whether it runs."""
        service = self._service(stored.home)
        name, reservation = _read_record(stored)
        described = None if service is None or not name else service.describe(name)
        trials: tuple[Trial, ...] = ()
        if described is not None and service is not None:
            status = described["HyperParameterTuningJobStatus"]
            state = _STATES[status]
            # Other strategies stop no trial, and a stop of the sweep stops all.
            is_pruning = self.sweep.spec.strategy == HYPERBAND and status not in _STOPS
            trials = tuple(
                self._read_trial(number, each, reservation, is_pruning=is_pruning)
                for number, each in enumerate(service.trials(name))
            )
            reason = str(described.get("FailureReason", ""))
        elif name:
            state = SweepState.FAILED
            reason = f"there is no tuning job {name}: it was deleted, or its sandbox ended"
        else:
            state = SweepState.INTERRUPTED
            reason = "its tuning job was not created; start the sweep again"
        return SweepStatus.of(stored, state, reason, trials), state is SweepState.RUNNING

    def stop(self, stored: StoredSweep) -> None:
        """Stop the tuning job; SageMaker then stops its trials."""
        service = self._service(stored.home)
        name, _ = _read_record(stored)
        if service is not None and name:
            service.stop(name)

    def has_other_code(self, stored: StoredSweep) -> bool:  # noqa: ARG002 (for controllers)
        """Return False: a tuning job of other code has another name, and is another sweep."""
        return False

    def _service(self, home: Path) -> TuningService | None:
        """Return the tuning jobs of the sweep's backend; None if its sandbox does not run. Nothing is started."""
        if not facts_of(self.backend).uses_account:
            return None
        context = BackendContext(
            home, lambda: self.settings or find_settings(self.sweep.job), known_prices
        )
        opened = next(iter(backend_package(self.backend).find_backends(context)), None)
        return None if opened is None else opened.tuning_jobs()

    def _read_trial(
        self, number: int, found: TuningTrial, reservation: float, *, is_pruning: bool
    ) -> Trial:
        try:
            values = read_values(searched_values(self.sweep), found.hyperparameters)
        except TrialError:
            # Another program has created this tuning job.
            values = dict(found.hyperparameters)
        state, reason = _state_of(found, is_pruning=is_pruning)
        cost = found.cost_usd if found.cost_usd is not None else reservation
        is_active = state.is_active
        return Trial(
            number=number,
            values=values,
            state=state,
            run=found.run,
            objective=found.objective,
            reservation_usd=reservation if is_active else 0.0,
            settled_usd=0.0 if is_active else cost,
            overrun_usd=0.0 if is_active else max(0.0, cost - reservation),
            reason=reason,
            started=found.created,
            ended=found.ended,
        )


def _state_of(found: TuningTrial, *, is_pruning: bool) -> tuple[TrialState, str]:
    """Return the state of a trial and the reason.

    Args:
        found: What SageMaker knows about it.
        is_pruning: Whether it is the tuning job that stops trials.
    """
    if not found.state.is_final:
        return TrialState.RUNNING, ""
    if found.state is State.SUCCEEDED and found.objective is None:
        return TrialState.FAILED, "its log has no value of the objective"
    if found.state is State.STOPPED and is_pruning and found.objective is not None:
        return TrialState.PRUNED, "stopped before its end"
    states = {State.SUCCEEDED: TrialState.SUCCEEDED, State.STOPPED: TrialState.STOPPED}
    return states.get(found.state, TrialState.FAILED), found.reason


def _write_record(stored: StoredSweep, tuning: TuningPlan) -> None:
    record = {"name": tuning.name, "reservation_usd": tuning.plan.cost.max_usd}
    write_atomically(stored.folder / TUNING_FILE, dump_json(record, indent=1) + "\n")


def _read_record(stored: StoredSweep) -> tuple[str, float]:
    """Return the name of the tuning job, which is empty before the first start, and a trial's reservation."""
    try:
        record = load_json((stored.folder / TUNING_FILE).read_bytes())
    except (OSError, ValueError):
        return "", 0.0
    if not isinstance(record, dict):
        return "", 0.0
    return str(record.get("name", "")), float(record.get("reservation_usd") or 0.0)
