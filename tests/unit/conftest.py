"""Fixtures of the tests without processes or servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.plans import CODE, NOW, SETTINGS, TASK_JOB, WriteJob

from cloudtrain.catalog import bundled_prices
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.targets import SageMakerTarget, Target
from cloudtrain.settings.settings import Settings


@pytest.fixture
def plan_of(job: WriteJob) -> Callable[..., Plan]:
    """Return a function that plans a job with overrides, for SageMaker with these settings or for another target."""

    def plan(
        *overrides: str,
        text: str = TASK_JOB,
        settings: Settings = SETTINGS,
        target: Target | None = None,
        **arguments: Any,
    ) -> Plan:
        path = job(
            text, mine_py="class Mine(Task):\n    def __init__(self, layers=2): ...\n", train_py=""
        )
        spec = JobSpec.from_yaml(path, overrides)
        target = target or SageMakerTarget(settings, bundled_prices())
        return make_plan(spec, CODE, target, now=NOW, suffix="1a2b3c", **arguments)

    return plan
