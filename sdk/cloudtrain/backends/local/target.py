"""This machine as the target of a plan."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.cost import (
    CostPlan,
    OverLimit,
    TimeLimits,
)
from cloudtrain.planning.diagnostics import Step, warning
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.storage_layout import (
    Locations,
    ResumeSource,
    folder_locations,
    resume_source,
)
from cloudtrain.planning.target_checks import check_local
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import MACHINE_BACKEND
from cloudtrain.support.home_folder import find_owner, foreign_homes, is_own


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
    name = MACHINE_BACKEND
    role = "arn:aws:iam::000000000000:role/local"

    def run_suffix(self, identity: str) -> str:
        # Two local runs may start in the same second.
        return secrets.token_hex(3)

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
        return folder_locations(self.home.resolve(), spec, digest, run, resumed)
