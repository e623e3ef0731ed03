"""The target of a plan: what differs between the places where a run can take place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any, ClassVar, Protocol

from cloudtrain import catalog
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.planning.cost import (
    CostPlan,
    TimeLimits,
)
from cloudtrain.planning.diagnostics import Step
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import ClusterPlan, Upload
from cloudtrain.planning.storage_layout import (
    Locations,
    ResumeSource,
)
from cloudtrain.settings.settings import Origin, Settings


class Target(Protocol):
    """Where a plan's run takes place. The defaults are those of a place without AWS."""

    name: ClassVar[str]
    """Name of the backend that such a plan is for; the sandbox runs plans for SageMaker."""
    settings: Settings
    """The account."""
    machine: Machine | None
    """The machine whose own Python runs the ranks: this one, or a node of a cluster; None for containers."""
    cuda_on_cpu: bool = False
    """Whether runs use a stand-in for CUDA."""
    installs: bool = False
    """Whether runs on this machine use an environment with their requirements."""

    @property
    def needs_instance_type(self) -> bool:
        """Whether a job must name a type of instance."""
        return True

    @property
    def uses_this_environment(self) -> bool:
        """Whether the ranks use this Python and its packages, so that these can be checked."""
        return self.machine is not None

    @property
    def region(self) -> str:
        """AWS region, by default one whose prices are known."""
        return self.settings.region or catalog.bundled_prices().regions[0]

    @property
    def role(self) -> str:
        """ARN of the execution role."""

    @property
    def sender(self) -> str | None:
        """What sends the request: `estimator` or `boto3`; None where nothing is sent."""
        return None

    @property
    def settings_beside_job(self) -> tuple[Origin, ...]:
        """Settings that the request takes from a cloudtrain.toml beside the job."""
        return ()

    @property
    def uploads_data(self) -> bool:
        """Whether local data is uploaded before the start."""
        return False

    def assumed_checkpoints(self, spec: JobSpec, run: str) -> ResumeSource | None:
        """Return where an earlier run saves by default, for an offline plan; None where there is no default."""
        return None

    def run_suffix(self, identity: str) -> str:
        """Return six hexadecimal digits for the id of a new run of this identity."""

    def check(
        self, spec: JobSpec, conventions: ScriptConventions, resumed: ResumeSource | None
    ) -> Iterator[Diagnostic]:
        """Check what matters for this target only."""

    def decide_limits(self, spec: JobSpec, today: date) -> Step[tuple[TimeLimits, CostPlan]]:
        """Return the time limits, and the estimate and limit of the cost of a run that reaches them."""

    def max_wait_seconds(self, spec: JobSpec, limits: TimeLimits) -> int | None:
        """Return the request's limit of waiting and training together, with spot; else None."""

    def resume_source(self, spec: JobSpec, uri: str) -> ResumeSource:
        """Return the checkpoints at a uri in `checkpoint.resume`."""

    def locations(
        self, spec: JobSpec, digest: str, run: str, resumed: ResumeSource | None
    ) -> Locations:
        """Return the uris of a run's files, for code with this digest."""

    def uploads(self, spec: JobSpec, locations: Locations) -> tuple[Upload, ...]:
        """Return the uploads of the job's local data."""
        return ()

    def queue(self, spec: JobSpec, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the SubmitServiceJob document without its payload, or None without a queue."""
        return None

    def batch_job(
        self,
        spec: JobSpec,
        cluster: ClusterPlan,
        limits: TimeLimits,
        *,
        run: str,
        identity: str,
    ) -> BatchJob | None:
        """Return what a cluster's queue receives; None where there is none. It is a part of the plan's identity.

        Args:
            spec: The job.
            cluster: Its instances and ranks.
            limits: Its time limits.
            run: The run id.
            identity: The plan's identity; empty while it is computed.
        """
        return None

    def network_gbps(self, spec: JobSpec) -> float | None:
        """Return the network bandwidth between instances in Gbit/s; None when it is unknown or irrelevant."""
        return None
