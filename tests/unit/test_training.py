"""The identity of a training, as the plan computes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.planning.run_config import identify_training
from cloudtrain.runs.previous_run import PreviousRun

JOB = """\
name: demo
code: {task: "mine:Mine", args: {width: 3, rate: .inf}}
cluster: {instance_type: ml.p4d.24xlarge}
data: {train: data}
train: {steps: 10, learning_rate: 0.1}
checkpoint: {uri: "s3://bucket/shared"}
"""


@pytest.fixture
def training(job: Callable[..., Path]) -> Callable[..., dict[str, Any]]:
    """Return a function that plans the job with overrides and returns the identity of its training."""

    def plan(*overrides: str, text: str = JOB, local: bool = False) -> dict[str, Any]:
        path = job(
            text,
            mine_py="class Mine(Task):\n    def __init__(self, width, rate): ...\n",
            train_py="",
        )
        (path.parent / "data").mkdir(exist_ok=True)
        (path.parent / "data" / "x").write_text("x")
        return cloudtrain.plan(cloudtrain.validate(path, overrides), local=local).config.training

    return plan


Training = Callable[..., dict[str, Any]]


def test_local_and_cluster_plans_have_one_identity(training: Training) -> None:
    found = training()
    assert found == {
        "entry": "mine:Mine",
        "args": {"width": 3, "rate": float("inf")},
        "data": {"train": "data"},
        "train": {"learning_rate": 0.1},
    }
    assert training("checkpoint.uri=null", local=True) == found


@pytest.mark.parametrize(
    "override",
    [
        *(
            "train.steps=20",
            "train={epochs: 3, learning_rate: 0.1}",
            "cluster.instances=2",
            "limits.runtime=2h",
        ),
        *("tags.team=x", "train.seed=0", "checkpoint.keep=7", "train.parallel={data: ddp}"),
    ],
)
def test_fields_that_may_differ_are_not_in_the_identity(training: Training, override: str) -> None:
    assert training(override) == training()


@pytest.mark.parametrize(
    "override",
    ["train.seed=1", "train.batch_size=3", "code.args={width: 4, rate: .inf}", "data={train: 's3://bucket/other'}",
     "train.parallel={data: fsdp}"],
)  # fmt: skip
def test_fields_that_change_the_training_are_in_the_identity(
    training: Training, override: str
) -> None:
    assert training(override) != training()


def test_a_resumed_run_keeps_its_identity(job: Callable[..., Path]) -> None:
    """The job of a resumed run names data by its uploaded URI, and so do the jobs of later runs."""
    path = job(JOB, mine_py="class Mine(Task):\n    def __init__(self, width, rate): ...\n")
    (path.parent / "data").mkdir()
    (path.parent / "data" / "x").write_text("x")
    settings = cloudtrain.Settings(bucket="bucket")
    first = cloudtrain.plan(
        cloudtrain.validate(path, ["data={train: data, test: 's3://bucket/test'}"]),
        settings=settings,
    )
    first_content = json.loads(first.to_file())

    def resume(content: dict[str, Any], *overrides: str) -> dict[str, Any]:
        """Return the plan.json of a run that resumes the run of another plan.json."""
        previous = PreviousRun(content)
        spec = previous.job(overrides)
        args = {"width": 3, "rate": float("inf")}
        training = identify_training(spec, args, previous.saved.uploaded)
        return {
            **content,
            "job": spec.to_document(),
            "config": {**content["config"], "training": training},
        }

    again = resume(first_content, "train.steps=20")
    assert again["job"]["data"]["train"]["uri"].startswith("s3://"), (
        "the data is where the run has uploaded it"
    )
    assert again["config"]["training"] == first.config.training
    assert resume(again)["config"]["training"] == first.config.training
    without_identity = {**first_content, "config": {**first_content["config"], "training": {}}}
    assert resume(without_identity)["config"]["training"] == first.config.training
    other = resume(first_content, "data.train=s3://bucket/other")["config"]["training"]
    assert other["data"]["train"] == "s3://bucket/other"
