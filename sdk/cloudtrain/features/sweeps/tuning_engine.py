"""Engine `sagemaker`: a tuning job of SageMaker proposes, starts and ranks the trials, without a controller.

The name of the tuning job follows from the sweep and its code, and AWS accepts a name only once. So a repeated start,
from any machine, finds the tuning job of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.base import BackendContext, TuningService, TuningTrial
from cloudtrain.backends.registry import backend_package
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.client import Client
from cloudtrain.client.submission import raise_failed
from cloudtrain.errors import UserError
from cloudtrain.features.sweeps.results import SweepState, SweepStatus
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.features.sweeps.tuning_request import TuningPlan, render_tuning, searched_values
from cloudtrain.job.job_fields import SWEEP_TAG
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import Settings
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.backend_facts import facts_of
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.contract.trial import TrialError, read_values

if TYPE_CHECKING:
    from cloudtrain.bundle.archive import Bundle

TUNING_FILE = "tuning.json"
_FINAL = ("Completed", "Failed", "Stopped")
_MOST_ATTEMPTS = 1000
_STATES = {
    "InProgress": SweepState.RUNNING,
    "Stopping": SweepState.RUNNING,
    "Completed": SweepState.SUCCEEDED,
    "Failed": SweepState.FAILED,
    "Stopped": SweepState.STOPPED,
}


@dataclass(frozen=True)
class TuningEngine:
    """The tuning job of a stored sweep.

    Attributes:
        stored: The sweep.
        settings: The account; None for the settings of environment and files.
    """

    stored: StoredSweep
    settings: Settings | None = None

    @property
    def name(self) -> str:
        """Name of the tuning job; empty before the first start."""
        return str(self._record().get("name", ""))

    def start(self, *, new: bool = False) -> None:
        """Check the account, upload the code and create the tuning job, unless it exists.

        Args:
            new: Create another one beside an unfinished one of an equal sweep.

        Raises:
            CloudError: A check failed, or AWS refused; nothing was created.
            SpecError: The job, or the request of its tuning job, is not valid.
        """
        job, backend = self.stored.sweep.job, self.stored.backend
        client = Client(self.settings)
        opened = client.backend(backend, job)
        service = opened.tuning_jobs()
        if self.name and service.describe(self.name) is not None:
            return
        plan = client.planner(job, backend=backend)(job)
        tuning, is_known = self._choose(service, plan, new=new)
        self._save(tuning)
        if is_known:
            return
        wait_for_checks = opened.start_checks(tuning.plan)
        bundle = self._pack()
        raise_failed(wait_for_checks())
        tag = {"Key": SWEEP_TAG, "Value": self.stored.id}
        tags = [*tuning.request["Tags"], tag]
        of_trials = {**tuning.plan.request, "Tags": [*tuning.plan.request["Tags"], tag]}
        stored = dataclasses.replace(tuning.plan, request=of_trials)
        service.create({**tuning.request, "Tags": tags}, stored, bundle)

    def _choose(self, service: TuningService, plan: Plan, *, new: bool) -> tuple[TuningPlan, bool]:
        """Return the tuning job to create, or the unfinished one of an equal sweep, and whether it exists."""
        for attempt in range(1, _MOST_ATTEMPTS):
            tuning = render_tuning(self.stored.sweep, plan, attempt=attempt)
            found = service.describe(tuning.name)
            if found is None:
                return tuning, False
            if found["HyperParameterTuningJobStatus"] not in _FINAL and not new:
                return tuning, True
        raise UserError(f"this sweep was started {_MOST_ATTEMPTS} times", "change its name")

    def _pack(self) -> Bundle:
        from cloudtrain.bundle import BUNDLES_FOLDER, collect
        from cloudtrain.bundle.archive import write_bundle

        job, home = self.stored.sweep.job, self.stored.home
        return write_bundle(
            collect(job.code_directory, job.includes, home=home), home / BUNDLES_FOLDER
        )

    def _save(self, tuning: TuningPlan) -> None:
        record = {"name": tuning.name, "reservation_usd": tuning.plan.cost.max_usd}
        write_atomically(self.stored.folder / TUNING_FILE, dump_json(record, indent=1) + "\n")

    def _record(self) -> Mapping[str, Any]:
        try:
            record = load_json((self.stored.folder / TUNING_FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def status(self) -> SweepStatus:
        """Return the status of the tuning job and its trials."""
        service = self._service()
        described = None if service is None or not self.name else service.describe(self.name)
        trials = (
            () if described is None or service is None else self._read(service.trials(self.name))
        )
        state, reason = (
            SweepState.INTERRUPTED,
            "its tuning job was not created; start the sweep again",
        )
        if described is not None:
            state = _STATES[described["HyperParameterTuningJobStatus"]]
            reason = str(described.get("FailureReason", ""))
        elif self.name:
            state = SweepState.FAILED
            reason = f"there is no tuning job {self.name}: it was deleted, or its sandbox ended"
        return SweepStatus.of(self.stored, state, reason, trials)

    def stop(self) -> None:
        """Stop the tuning job; SageMaker then stops its trials."""
        service = self._service()
        if service is not None and self.name:
            service.stop(self.name)

    def _service(self) -> TuningService | None:
        """Return the tuning jobs of the sweep's backend; None if its sandbox does not run. Nothing is started."""
        job = self.stored.sweep.job
        context = BackendContext(
            self.stored.home, lambda: self.settings or find_settings(job), known_prices
        )
        if not facts_of(self.stored.backend).uses_account:
            return None
        opened = next(iter(backend_package(self.stored.backend).find_backends(context)), None)
        return None if opened is None else opened.tuning_jobs()

    def _read(self, found: Iterable[TuningTrial]) -> tuple[Trial, ...]:
        reservation = float(self._record().get("reservation_usd") or 0.0)
        return tuple(
            self._read_trial(number, each, reservation) for number, each in enumerate(found)
        )

    def _read_trial(self, number: int, found: TuningTrial, reservation: float) -> Trial:
        try:
            values = read_values(searched_values(self.stored.sweep), found.hyperparameters)
        except TrialError:  # somebody else has created this tuning job
            values = dict(found.hyperparameters)
        state, reason = _state_of(found)
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


def _state_of(found: TuningTrial) -> tuple[TrialState, str]:
    """Return the state of a trial and the reason."""
    if not found.state.is_final:
        return TrialState.RUNNING, ""
    if found.state is State.SUCCEEDED and found.objective is None:
        return TrialState.FAILED, "its log has no value of the objective"
    if found.state is State.STOPPED and found.objective is not None:
        return TrialState.PRUNED, "stopped before its end"
    states = {State.SUCCEEDED: TrialState.SUCCEEDED, State.STOPPED: TrialState.STOPPED}
    return states.get(found.state, TrialState.FAILED), found.reason
