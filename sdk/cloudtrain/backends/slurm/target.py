"""A Slurm cluster as the target of a plan."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date

from cloudtrain.backends.slurm.batch_request import (
    AFTER_LIMIT_SECONDS,
    exported_names,
    render_batch_job,
)
from cloudtrain.backends.slurm.job_checks import check_job
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.planning.cost import CostPlan, OverLimit, TimeLimits
from cloudtrain.planning.diagnostics import Step, decision, error, warning
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import ClusterPlan
from cloudtrain.planning.storage_layout import (
    Locations,
    ResumeSource,
    folder_locations,
    resume_source,
)
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Origin, Settings
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.backend_facts import SLURM_BACKEND
from cloudtrain.support.units import format_duration, format_usd

_LEAST_RUNTIME_SECONDS = 60


@dataclass(frozen=True)
class SlurmTarget(Target):
    """A Slurm cluster, whose nodes share the site's folder.

    Attributes:
        settings: The account, for runs that use S3.
        site: The cluster.
        this_python: The Python that submits; the nodes use it where the site names no other.
        exported: Names of the environment variables that runs get from the shell that submits.
        installs: Whether runs use an environment with their requirements.
    """

    settings: Settings
    site: SlurmSite
    this_python: str = field(default_factory=lambda: sys.executable)
    exported: tuple[str, ...] = field(default_factory=lambda: exported_names(os.environ))
    installs: bool = False
    name = SLURM_BACKEND
    role = "arn:aws:iam::000000000000:role/local"
    needs_instance_type = False

    @property
    def machine(self) -> Machine:  # type: ignore[override]
        """A node. Its variables are unknown, so secrets are read there."""
        from cloudtrain.backends.container.machine import missing_trackers

        missing = missing_trackers() if self.uses_this_environment else frozenset()
        return Machine(gpus=self.site.gpus_per_node, missing=missing, is_node=True)

    @property
    def uses_this_environment(self) -> bool:
        """Whether the nodes use this Python as it is here."""
        return self.site.python is None and not self.site.setup

    @property
    def python(self) -> str:
        """Absolute path of the Python on the nodes."""
        return self.site.python or self.this_python

    @property
    def settings_beside_job(self) -> tuple[Origin, ...]:
        site = self.site
        if not site.is_beside_job:
            return ()
        line = site.origin.rpartition(":")[2]
        number = int(line) if line.isdigit() else None
        return (Origin(site.setting, site.text, site.file, number),)

    def run_suffix(self, identity: str) -> str:
        # Two runs of one request may start in the same second; the comment of their jobs has the identity.
        return secrets.token_hex(3)

    def check(
        self, spec: JobSpec, conventions: ScriptConventions, resumed: ResumeSource | None
    ) -> Iterator[Diagnostic]:
        if not self.site.is_trusted:
            yield warning(
                f"{self.site.setting}: from {self.site.file}; submit asks for confirmation before it uses this (or --trust)"
            )
        yield from check_job(
            spec,
            conventions,
            self.machine,
            self.python,
            installs=self.installs,
            is_own_python=self.site.python is None,
        )

    def decide_limits(self, spec: JobSpec, today: date) -> Step[tuple[TimeLimits, CostPlan]]:
        runtime = spec.limits.runtime
        longest = self.site.time_seconds
        price = self.site.usd_per_node_hour
        if price is None:
            if spec.limits.cost is not None:
                yield warning(
                    f"limits.cost limits nothing: {self.site.setting} has no usd_per_node_hour ({self.site.origin})"
                )
            cost = CostPlan(0.0, 0.0, None)
        else:
            hourly = price * spec.cluster.preferred_instances
            runtime = yield from _affordable_runtime(spec, hourly)
            cost = CostPlan(
                usd_per_hour=round(hourly, 4),
                max_usd=math.ceil(hourly * runtime / 36) / 100,
                price_as_of=None,
                ceiling_usd=spec.limits.cost,
                not_covered=("the time that attempts lose between two checkpoints",),
            )
        if longest is not None and runtime + AFTER_LIMIT_SECONDS > longest:
            yield decision(
                f"a job of this site ends after {format_duration(longest)} ({self.site.origin_of('time')}): the run saves "
                f"before, is queued again under its id and continues, until it has run for {format_duration(runtime)}"
            )
        return TimeLimits(runtime, None, OverLimit()), cost

    def max_wait_seconds(self, spec: JobSpec, limits: TimeLimits) -> int | None:
        return None

    def resume_source(self, spec: JobSpec, uri: str) -> ResumeSource:
        return resume_source(uri, is_synced=False)

    def locations(
        self, spec: JobSpec, digest: str, run: str, resumed: ResumeSource | None
    ) -> Locations:
        # As it is written: the same path must lead there on every node.
        return folder_locations(self.site.folder, spec, digest, run, resumed)

    def batch_job(
        self,
        spec: JobSpec,
        cluster: ClusterPlan,
        limits: TimeLimits,
        *,
        run: str,
        identity: str,
    ) -> BatchJob:
        return render_batch_job(
            spec,
            cluster,
            self.site,
            runtime_seconds=limits.runtime_seconds,
            run=run,
            identity=identity,
            python=self.python,
            exported=self.exported,
        )


def _affordable_runtime(spec: JobSpec, hourly: float) -> Step[int]:
    """Return the time limit within `limits.cost`: a default one is shortened, a longer one in the job is an error."""
    runtime = spec.limits.runtime
    limit = spec.limits.cost
    if limit is None:
        return runtime
    affordable = math.floor(limit / hourly * 3600)
    if affordable >= runtime:
        return runtime
    pays = f"{limit:g} USD pays for {format_duration(affordable)} of {format_usd(hourly)} per hour"
    at = ("limits", "cost")
    if affordable < _LEAST_RUNTIME_SECONDS:
        yield error(at, pays, "raise limits.cost, or take fewer instances")
        return runtime
    if "runtime" in spec.limits.model_fields_set:
        needed = math.ceil(runtime * hourly / 3600)
        hint = f"raise it to {needed} USD, or lower limits.runtime to {affordable // 60}m"
        yield error(at, f"{pays}; limits.runtime is {format_duration(runtime)}", hint)
        return runtime
    yield decision(
        f"runtime: {format_duration(affordable)} instead of {format_duration(runtime)}, so that its estimate is at most "
        f"{limit:g} USD (limits.cost)"
    )
    return affordable
