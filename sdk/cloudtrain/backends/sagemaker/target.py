"""An account as the target of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from cloudtrain import catalog
from cloudtrain.catalog import Prices
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.cost import (
    CostPlan,
    TimeLimits,
    compute_time_limits,
    estimate_cost,
    price_cluster,
)
from cloudtrain.planning.diagnostics import Step
from cloudtrain.planning.plan import Upload
from cloudtrain.planning.service_job import render_service_job
from cloudtrain.planning.storage_layout import (
    PLACEHOLDER_BUCKET,
    PLACEHOLDER_ROLE,
    Locations,
    ResumeSource,
    direct_folder_of,
    resume_source,
    saves_of,
    synced_resume_folder,
    syncs_checkpoints,
    unless_resumed,
)
from cloudtrain.planning.target_checks import check_sagemaker, warn_about_price
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Origin, Settings
from cloudtrain.support.backend_facts import DEFAULT_BACKEND
from cloudtrain_runtime.contract import BUNDLE_FILE


@dataclass(frozen=True)
class SageMakerTarget(Target):
    """SageMaker, or the sandbox in its place. Missing settings become placeholders, with a warning."""

    settings: Settings
    prices: Prices
    name = DEFAULT_BACKEND
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
        own = f"{base}/{run}/checkpoints"
        given = spec.checkpoint.uri
        is_new = spec.checkpoint.resume == "never"
        # SageMaker downloads all of the folder at the start, so that a new training has a folder of its own.
        separate = given
        if given is not None and is_new and syncs_checkpoints(spec):
            separate = f"{given.rstrip('/')}/{run}"
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
        if spec.cluster.preferred_instances <= 1 or len(known) < len(found):
            return None
        return min(known)
