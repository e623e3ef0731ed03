"""Scenes of a rehearsal, for tests of single checks: the plan of a cluster, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.features.rehearsal.base import RehearsalContext
from cloudtrain.job.spec import load_job
from cloudtrain.planning.planner import make_plan
from support.plans import CODE, NOW, SETTINGS


def context_of(
    job: Path, folder: Path, *overrides: str, channels: Mapping[str, Path] | None = None
) -> RehearsalContext:
    """Return the context of a job after its runs; the code folder is that of the job."""
    spec = load_job(job, overrides).spec
    target = SageMakerTarget(SETTINGS, bundled_prices())
    plan = make_plan(
        spec, CODE, target, now=NOW, suffix=None, resumed=None, data_stamp="", found=()
    )
    folder.mkdir()
    return RehearsalContext(
        spec=spec,
        plan=plan,
        code=job.parent,
        folder=folder,
        python=sys.executable,
        channels=channels or {},
        reference=None,
        environ=dict(os.environ),
        deadline=time.monotonic() + 300,
        seed=0,
        run_process=_run,
    )


def _run(
    command: list[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False
    )
