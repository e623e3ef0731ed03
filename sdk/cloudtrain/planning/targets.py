"""The targets of a plan, this machine and SageMaker: each decides what differs between the two."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Protocol

from cloudtrain import catalog
from cloudtrain.catalog import Prices
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.script_conventions import ScriptConventions
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.cost import (
    CostPlan,
    OverLimit,
    TimeLimits,
    compute_time_limits,
    estimate_cost,
    price_cluster,
)
from cloudtrain.planning.diagnostics import Step, warning
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import LOCAL, SAGEMAKER, Upload
from cloudtrain.planning.service_job import render_service_job
from cloudtrain.planning.storage_layout import (
    PLACEHOLDER_BUCKET,
    PLACEHOLDER_ROLE,
    Locations,
    ResumeSource,
    direct_folder_of,
    local_uri,
    resume_source,
    saves_of,
    synced_resume_folder,
    syncs_checkpoints,
    unless_resumed,
)
from cloudtrain.planning.target_checks import check_local, check_sagemaker, warn_about_price
from cloudtrain.settings.settings import Origin, Settings
from cloudtrain.support.home_folder import find_owner, foreign_homes, is_own
from cloudtrain_runtime.contract import BUNDLE_FILE


class Target(Protocol):
    """Where a plan's run takes place. The defaults are those of a place without AWS."""

    name: ClassVar[str]
    """`local` or `sagemaker`."""
    settings: Settings
    """The account."""
    machine: Machine | None
    """This machine in a local plan, else None."""
    cuda_on_cpu: bool = False
    """Whether runs use a stand-in for CUDA."""
    installs: bool = False
    """Whether runs on this machine use an environment with their requirements."""

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
        """Return the time limits, and the estimate and ceiling of a run that reaches them."""

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

    def network_gbps(self, spec: JobSpec) -> float | None:
        """Return the network bandwidth between instances in Gbit/s; None when it is unknown or irrelevant."""
        return None


@dataclass(frozen=True)
class LocalTarget(Target):
    """This machine, with the folder of local runs (`.cloudtrain`). Local runs cost nothing.

    Attributes:
        installs: Whether runs use an environment with their requirements.
        cuda_on_cpu: Whether runs use a stand-in for CUDA.
    """

    settings: Settings
    home: Path
    machine: Machine
    installs: bool = False
    cuda_on_cpu: bool = False
    name = LOCAL
    role = "arn:aws:iam::000000000000:role/local"

    def run_suffix(self, identity: str) -> str:
        return secrets.token_hex(3)  # two local runs may start in the same second

    def check(
        self, spec: JobSpec, conventions: ScriptConventions, resumed: ResumeSource | None
    ) -> Iterator[Diagnostic]:
        yield from check_local(
            spec, conventions, self.machine, installs=self.installs, cuda_on_cpu=self.cuda_on_cpu
        )
        for each in foreign_homes(self.home):
            yield warning(
                f"{each} belongs to {find_owner(each)} or can be changed by other users, so it is not used for local "
                f"runs: {self.home} is"
            )
        if self.home.is_dir() and not is_own(self.home):
            yield warning(
                f"other users can write to {self.home}, and what they put there is executed as you: "
                "choose another folder with CLOUDTRAIN_HOME"
            )

    def decide_limits(self, spec: JobSpec, today: date) -> Step[tuple[TimeLimits, CostPlan]]:
        yield from ()
        return TimeLimits(spec.limits.runtime, None, OverLimit()), CostPlan(0.0, 0.0, None)

    def max_wait_seconds(self, spec: JobSpec, limits: TimeLimits) -> int | None:
        spot = spec.cluster.spot
        return None if spot is None else spot.max_wait or 2 * limits.runtime_seconds

    def resume_source(self, spec: JobSpec, uri: str) -> ResumeSource:
        return resume_source(uri, is_synced=False)

    def locations(
        self, spec: JobSpec, digest: str, run: str, resumed: ResumeSource | None
    ) -> Locations:
        root = self.home.resolve()
        base = (root / "runs" / run).as_uri()
        own = f"{base}/checkpoints"
        given = own if spec.checkpoint.uri is None else local_uri(spec, spec.checkpoint.uri)
        checkpoints = synced_resume_folder(spec, resumed) or given
        return Locations(
            base=root.as_uri(),
            code=(root / "bundles" / digest / BUNDLE_FILE).as_uri(),
            config=f"{base}/config",
            output=(root / "runs").as_uri(),
            checkpoints=checkpoints,
            saves=saves_of(spec, task=checkpoints, script=unless_resumed(given, own, resumed)),
            channels={name: local_uri(spec, channel.source) for name, channel in spec.data.items()},
        )


@dataclass(frozen=True)
class SageMakerTarget(Target):
    """SageMaker, or the sandbox in its place. Missing settings become placeholders, with a warning."""

    settings: Settings
    prices: Prices
    name = SAGEMAKER
    machine = None
    uploads_data = True

    @property
    def role(self) -> str:
        return self.settings.role or PLACEHOLDER_ROLE

    @property
    def sender(self) -> str | None:
        return self.settings.sender

    @property
    def settings_beside_job(self) -> tuple[Origin, ...]:
        return self.settings.beside_job

    def assumed_checkpoints(self, spec: JobSpec, run: str) -> ResumeSource | None:
        if self.settings.bucket is None:
            return None
        folder = f"s3://{self.settings.bucket}/{self.settings.prefix}/{run}/checkpoints"
        return ResumeSource(
            folder, direct_folder_of(folder) if spec.code.task is None else folder, run
        )

    def run_suffix(self, identity: str) -> str:
        return identity[:6]

    def check(
        self, spec: JobSpec, conventions: ScriptConventions, resumed: ResumeSource | None
    ) -> Iterator[Diagnostic]:
        return check_sagemaker(spec, self.settings, resumed)

    def decide_limits(self, spec: JobSpec, today: date) -> Step[tuple[TimeLimits, CostPlan]]:
        price = price_cluster(spec, self.region, self.prices)
        limits = yield from compute_time_limits(spec, price, self.region)
        cost = yield from estimate_cost(spec, price, self.region, limits, self.prices)
        yield from warn_about_price(self.settings, self.region, cost.price_as_of, today)
        return limits, cost

    def max_wait_seconds(self, spec: JobSpec, limits: TimeLimits) -> int | None:
        return limits.wait_seconds

    def resume_source(self, spec: JobSpec, uri: str) -> ResumeSource:
        return resume_source(
            uri, is_synced=spec.code.task is None and not spec.cluster.network.isolation
        )

    def locations(
        self, spec: JobSpec, digest: str, run: str, resumed: ResumeSource | None
    ) -> Locations:
        base = f"s3://{self.settings.bucket or PLACEHOLDER_BUCKET}/{self.settings.prefix}".rstrip(
            "/"
        )
        own, given = f"{base}/{run}/checkpoints", spec.checkpoint.uri
        is_new = spec.checkpoint.resume == "never"
        # SageMaker downloads all of the folder at the start, so that a new training has a folder of its own.
        separate = (
            f"{given.rstrip('/')}/{run}"
            if given is not None and is_new and syncs_checkpoints(spec)
            else given
        )
        checkpoints = (synced_resume_folder(spec, resumed) or separate or own).rstrip("/")
        direct = unless_resumed(given or own, own, resumed)
        shared = direct_folder_of(direct) + (f"/{run}" if direct != own and is_new else "")
        return Locations(
            base=base,
            code=f"{base}/code/{digest}/{BUNDLE_FILE}",
            config=f"{base}/{run}/config",
            output=(spec.output.uri or base).rstrip("/"),
            checkpoints=checkpoints,
            saves=saves_of(spec, task=checkpoints, script=shared),
            channels={
                name: channel.source if channel.local_path is None else f"{base}/{run}/data/{name}/"
                for name, channel in spec.data.items()
            },
        )

    def uploads(self, spec: JobSpec, locations: Locations) -> tuple[Upload, ...]:
        return tuple(
            Upload(str((spec.base / channel.local_path).resolve()), locations.channels[name])
            for name, channel in spec.data.items()
            if channel.local_path is not None
        )

    def queue(self, spec: JobSpec, request: Mapping[str, Any]) -> dict[str, Any] | None:
        return render_service_job(spec, request)

    def network_gbps(self, spec: JobSpec) -> float | None:
        """Return the rated bandwidth of the slowest type that the job may get."""
        found = [catalog.find_instance(name) for name in spec.cluster.types]
        known = [
            each.network_gbps
            for each in found
            if each is not None and each.network_gbps is not None
        ]
        return (
            min(known)
            if spec.cluster.preferred_instances > 1 and len(known) == len(found)
            else None
        )
