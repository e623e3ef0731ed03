"""Wrong types of arguments end in errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cloudtrain
from cloudtrain.console.metrics import print_history
from cloudtrain.errors import UserError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.history import MetricHistory


def spec(**values: Any) -> cloudtrain.JobSpec:
    return cloudtrain.JobSpec(
        name="demo", code={"script": "train.py"}, cluster={"instance_type": "ml.m5.large"}, **values
    )


def test_values_that_are_no_mapping_are_an_error() -> None:
    wrong: Any = "train.epochs=2"
    with pytest.raises(UserError, match="expected values by path"):
        spec().with_values(wrong)


def test_a_plan_is_no_job(plan_of: Callable[..., Plan]) -> None:
    wrong: Any = plan_of()
    with pytest.raises(UserError, match=r"got Plan\s+a plan cannot be submitted"):
        cloudtrain.submit(wrong)


def test_a_mapping_is_made_a_job() -> None:
    wrong: Any = {"name": "demo"}
    with pytest.raises(UserError, match=r"got dict\s+make a job of it: cloudtrain\.JobSpec"):
        cloudtrain.plan(wrong)


def test_the_summary_of_a_job_has_its_metrics() -> None:
    assert "loss=([0-9.]+)" in repr(spec(metrics={"loss": "loss=([0-9.]+)"}))


def test_a_run_without_metrics_says_how_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_history(MetricHistory(), show_all=False)
    assert "cloudtrain_runtime.report(step, loss=...)" in capsys.readouterr().err
