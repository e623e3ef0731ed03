"""The protocol of backends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from cloudtrain.errors import UserError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run, RunOperations
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.support.backend_facts import BackendFacts, place_name
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.bundle import ProgressCallback
    from cloudtrain.bundle.archive import Bundle
    from cloudtrain.catalog import Prices
    from cloudtrain.planning.targets import Target
    from cloudtrain.runs.billing import EndpointUse
    from cloudtrain.runs.previous_run import PreviousRun
    from cloudtrain.settings.settings import Settings
    from cloudtrain.support.checks import Check

_KEY_BYTES = 32


def make_storage_environ(
    environ: Mapping[str, str], settings: Settings, region: str | None = None
) -> dict[str, str]:
    """Return `environ` for a process that reads checkpoints: with the buckets' owners and, if given, their region."""
    in_region = {"AWS_DEFAULT_REGION": region} if region else {}
    return {**environ, **in_region, OWNERS_VARIABLE: dump_json(settings.bucket_owners)}


def with_key(config: RunConfig) -> RunConfig:
    """Return a run's configuration with the key by which its hosts recognise each other."""
    return replace(config, key=secrets.token_hex(_KEY_BYTES))


@dataclass(frozen=True)
class TuningTrial:
    """A trial of a tuning job.

    Attributes:
        run: Name of its training job, which is a run id.
        state: Its state.
        hyperparameters: The searched values, as SageMaker writes them.
        objective: Last value of the objective, or None.
        cost_usd: Cost so far in US dollars; None if the price is unknown.
        reason: Why it failed, or an empty text.
        created: When it was created, in seconds since the epoch.
        ended: When it ended, in seconds since the epoch, or None.
    """

    run: str
    state: State
    hyperparameters: Mapping[str, str]
    objective: float | None
    cost_usd: float | None
    reason: str
    created: float
    ended: float | None


class TuningService(Protocol):
    """Tuning jobs of SageMaker."""

    def describe(self, name: str) -> Mapping[str, Any] | None:
        """Return the response of DescribeHyperParameterTuningJob, or None if there is no such tuning job."""
        ...

    def create(
        self,
        request: Mapping[str, Any],
        plan: Plan,
        bundle: Bundle,
        progress: ProgressCallback | None = None,
    ) -> bool:
        """Upload the files of a plan and create its tuning job; return False if it exists already.

        Raises:
            CloudError: The cloud refused the request; nothing was created.
        """
        ...

    def trials(self, name: str) -> tuple[TuningTrial, ...]:
        """Return the trials of a tuning job, oldest first."""
        ...

    def stop(self, name: str) -> None:
        """Ask for the end of a tuning job and its trials. One that has ended is left as it is."""
        ...


@dataclass(frozen=True)
class HostingAccount:
    """An account with endpoints: the one whose models a backend's runs train.

    Attributes:
        backend: The backend.
        settings: Role, bucket, region and other settings.
        prices: Prices of instances.
        session: Returns the boto3 session.
        client: Returns the boto3 client of a service.
        poll_seconds: Time between two reads of a status.
    """

    backend: BackendFacts
    settings: Settings
    prices: Prices
    session: Callable[[], Any]
    client: Callable[[str], Any]
    poll_seconds: float

    def usd_per_hour(self, instance_type: str) -> float | None:
        """Return the price of an instance; None if it is unknown, and 0 where nothing is billed."""
        if not self.backend.is_billed:
            return 0.0
        return self.prices.hosting_usd_per_hour(instance_type, self.settings.region or "")


class OnlyRuns:
    """A backend with neither tuning jobs nor endpoints."""

    name: str

    def hosting_account(self) -> HostingAccount:
        """Raise a UserError."""
        raise UserError(f"there are no endpoints {place_name(self.name)}", "use --sandbox")

    def tuning_jobs(self) -> TuningService:
        """Raise a UserError."""
        raise UserError(
            f"there are no tuning jobs {place_name(self.name)}", "use engine: optuna, or --sandbox"
        )

    def endpoints(self, since: datetime | None, until: datetime | None) -> Iterable[EndpointUse]:  # noqa: ARG002
        """Return no endpoints."""
        return ()


class Backend(RunOperations, Protocol):
    """Runs plans.

    Guarantees:

    1. `submit` sends exactly `plan.request`, or nothing.
    2. After `submit` has returned, the run continues without this process.
    3. Every operation works with the run id alone, in a new process.
    4. `status` reports SUCCEEDED only for a run that succeeded, and keeps the reason of a failure.
    5. `logs` yields each line once.
    6. `stop` returns at once; all processes of the run end within the grace time.

    Attributes:
        capacity_pause_seconds: Seconds before the first retry of a submit that found no capacity.
    """

    capacity_pause_seconds: float

    @property
    def is_configured(self) -> bool:
        """Whether its settings are complete, so that its runs can be listed."""
        ...

    def target(self) -> Target:
        """Return what plans for this backend are made for."""
        ...

    def for_previous(self, previous: PreviousRun) -> Backend:
        """Return the backend that resumes a run: the same one, with the account of that run."""
        ...

    def check_ready(self) -> None:
        """Check that everything for a submit exists on this machine, such as settings and credentials.

        Raises:
            CloudtrainError: Something is missing. The message says what.
        """
        ...

    def start_checks(self, plan: Plan, *, skip: bool = False) -> Callable[[], tuple[Check, ...]]:
        """Start to check what a submit of the plan needs, and to load what takes long.

        Args:
            plan: The plan.
            skip: Leave out the checks that have to wait for an answer.

        Returns:
            A function that waits for the results.

        Raises:
            UserError: The plan cannot run, which was found without a wait.
        """
        ...

    def check_resume(self, plan: Plan) -> tuple[Check, ...]:
        """Check that the checkpoint that a plan resumes from exists and is complete.

        Raises:
            UserError: It does not, which was found without a wait.
        """
        ...

    def find_active_run(self, plan: Plan) -> Run | None:
        """Return the active run of the same request and code, or None. Backends whose runs are free return None."""
        ...

    def submit(
        self,
        plan: Plan,
        bundle: Bundle | None,
        *,
        is_new: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Run:
        """Start a run, or attach to the active run of the same request and code.

        Args:
            plan: The plan.
            bundle: Its code; None if an earlier run has stored it.
            is_new: Start another run beside an active one of the same request, under another id.
            progress: Callback `(bytes_done, bytes_total)`.

        Raises:
            CloudError: The cloud refused the request; nothing was started.
            UserError: A file is missing or cannot be read; nothing was started.
        """
        ...

    def hosting_account(self) -> HostingAccount:
        """Return the account whose endpoints serve the models of this backend's runs.

        Raises:
            UserError: This backend has none.
        """
        ...

    def tuning_jobs(self) -> TuningService:
        """Return the tuning jobs of SageMaker.

        Raises:
            UserError: This backend has none.
        """
        ...

    def endpoints(self, since: datetime | None, until: datetime | None) -> Iterable[EndpointUse]:
        """Return the endpoints of `deploy` that exist in a period, or that this machine has recorded.

        Args:
            since: Start of the period; None for the first endpoint's creation.
            until: End of the period; None for now.

        Raises:
            CloudError: The cloud refused, or cannot be reached.
        """
        ...

    def may_have(self, run: str) -> bool:
        """Return whether this backend may have a run. False is certain. Nothing is asked of the cloud."""
        ...

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the selected runs, newest first. Pages are fetched lazily.

        The statuses include progress only if reading it is cheap.
        """
        ...

    def storage_environ(self) -> Mapping[str, str]:
        """Return the environment of a process that reads the checkpoints of this backend's runs."""
        ...
