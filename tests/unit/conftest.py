"""Fixtures of the tests without processes or servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.plans import CODE, NOW, RUN, SETTINGS, TASK_JOB, WriteJob

from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.settings.settings import Settings


@pytest.fixture
def plan_of(job: WriteJob) -> Callable[..., Plan]:
    """Return a function that plans a job with overrides, settings and arguments of `make_plan`."""

    def plan(*overrides: str, text: str = TASK_JOB, settings: Settings = SETTINGS, **arguments: Any) -> Plan:
        path = job(text, mine_py="class Mine(Task):\n    def __init__(self, layers=2): ...\n", train_py="")
        spec = JobSpec.from_yaml(path, overrides)
        return make_plan(spec, settings, CODE, run=RUN, now=NOW, **arguments)

    return plan
