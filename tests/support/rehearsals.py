"""Scenes of a rehearsal, for tests of single checks: the plan of a cluster, and real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.features.rehearsal.memory import check_memory, probe
from cloudtrain.features.rehearsal.rank_memory import RankMemory
from cloudtrain.job.spec import JobSpec, load_job
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.support.checks import Check
from support.plans import CODE, NOW, SETTINGS


@dataclass(frozen=True)
class Scene:
    """A job after its runs; its code folder is that of the job."""

    spec: JobSpec
    plan: Plan
    code: Path
    folder: Path
    channels: Mapping[str, Path]
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def check_memory(self) -> Check:
        """Make the check `memory`."""
        return check_memory(self.spec, self.plan, self.channels, self.folder, self._run)

    def probe(self) -> RankMemory:
        """Measure the memory of a rank."""
        return probe(self.plan, self.channels, self.folder, self._run)

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.code,
            env=self.environ,
            timeout=300,
            capture_output=True,
            text=True,
            check=False,
        )


def scene_of(
    job: Path, folder: Path, *overrides: str, channels: Mapping[str, Path] | None = None
) -> Scene:
    """Return the scene of a job."""
    spec = load_job(job, overrides).spec
    target = SageMakerTarget(SETTINGS, bundled_prices())
    plan = make_plan(
        spec, CODE, target, now=NOW, suffix=None, resumed=None, data_stamp="", found=()
    )
    folder.mkdir()
    return Scene(spec=spec, plan=plan, code=job.parent, folder=folder, channels=channels or {})
