"""Jobs and settings for tests of plans."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.errors import SpecError
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.settings.settings import Settings

WriteJob = Callable[..., Path]

NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)

RUN = "demo-261120-101500-1a2b3c"

CODE = CodeInfo("d" * 64, 1000, 3)

SETTINGS = Settings(
    role="arn:aws:iam::123456789012:role/training", bucket="bucket", region="us-west-2"
)

TASK_JOB = """\
name: demo
code: {task: "mine:Mine", args: {layers: 4}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 3, batch_size: 16, accumulate: 4}
"""
SCRIPT_JOB = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.p4d.24xlarge}\n"

PlanOf = Callable[..., Plan]
"""Plans `TASK_JOB` or another text with overrides, see the fixture `plan_of`."""


def local(gpus: int = 0) -> dict[str, Any]:
    """Return the arguments that plan a run on this machine."""
    return {"target": LocalTarget(SETTINGS, Path("/somewhere/.cloudtrain"), Machine(gpus=gpus))}


def refusal(plan_of: PlanOf, *overrides: str, **arguments: Any) -> str:
    """Return the problems that `plan_of` raises."""
    with pytest.raises(SpecError) as caught:
        plan_of(*overrides, **arguments)
    return str(caught.value)
