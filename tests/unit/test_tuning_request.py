"""Tuning jobs: what they cannot express is refused with its place, and their names are deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.plans import CODE, NOW, SETTINGS

from cloudtrain import SpecError
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.features.sweeps.loader import LoadedSweep, load_sweep
from cloudtrain.features.sweeps.tuning_request import check_tuning, render_tuning, tuning_name
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.planner import make_plan

JOB = """\
name: demo
code: {task: "mine:Mine", args: {layers: 4}}
cluster: {instance_type: ml.g5.12xlarge}
train: {epochs: 9}
"""
SCRIPT = "name: demo\ncode: {script: train.py, args: {lr: 0.1, depth: 2}}\ncluster: {instance_type: ml.m5.large}\n"
RATE = {"train.learning_rate": {"log_uniform": [1e-5, 0.01]}}


def sweep_of(folder: Path, job: str = JOB, **fields: Any) -> LoadedSweep:
    folder.joinpath("mine.py").write_text(
        "class Mine(Task):\n    def __init__(self, layers=2): ...\n"
    )
    folder.joinpath("train.py").write_text("")
    folder.joinpath("job.yaml").write_text(job)
    content = {
        "job": "job.yaml",
        "engine": "sagemaker",
        "objective": "validation/loss",
        "trials": 8,
        "space": RATE,
    }
    folder.joinpath("sweep.yaml").write_text(yaml.safe_dump({**content, **fields}, sort_keys=False))
    return load_sweep(folder / "sweep.yaml")


def plan_of(sweep: LoadedSweep, digest: str = CODE.digest) -> Plan:
    target = SageMakerTarget(SETTINGS, bundled_prices())
    return make_plan(sweep.job, replace(CODE, digest=digest), target, now=NOW, suffix="1a2b3c")


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        (
            {"space": {"train.warmup": {"choice": ["5 steps"]}}},
            "sweep.yaml:7",
            "a trial of a tuning job cannot change",
        ),
        (
            {"space": {"cluster.instances": {"int": [1, 4]}}},
            "sweep.yaml:7",
            "search train.accumulate, ",
        ),
        (
            {"space": {**RATE, "train.seed": {"int": [1, 9], "step": 2}}},
            "sweep.yaml:14",
            "a range of a tuning job has no steps",
        ),
        (
            {
                "space": {
                    "train.schedule": {"choice": ["cosine"]},
                    "train.seed": {"int": [1, 9], "when": {"train.schedule": "cosine"}},
                }
            },
            "sweep.yaml:14",
            "a tuning job has no conditions",
        ),
        (
            {"space": {"code.args.layers": {"choice": [2, "many"]}}},
            "sweep.yaml:8",
            "must be of one kind",
        ),
        ({"pruning": "asha"}, "sweep.yaml:10", "use pruning: median"),
        (
            {"strategy": "hyperband", "rungs": {"factor": 4}},
            "sweep.yaml:12",
            "SageMaker chooses the ratio",
        ),
        (
            {
                "space": {"train.compile": {"choice": [True, False]}},
                "strategy": "grid",
                "trials": 3,
            },
            "sweep.yaml:4",
            "a tuning job runs all 2 combinations of its grid",
        ),
        (
            {"objective": {"metric": "function/score", "goal": "max"}},
            "sweep.yaml:",
            "SageMaker cannot call a function of Python",
        ),
    ],
)
def test_what_a_tuning_job_cannot_search_has_a_place(
    tmp_path: Path, fields: dict[str, Any], place: str, message: str
) -> None:
    found = [
        str(each).replace(f"{tmp_path}/", "") for each in check_tuning(sweep_of(tmp_path, **fields))
    ]
    assert len(found) == 1, found
    assert found[0].startswith(place)
    assert message in found[0]


@pytest.mark.parametrize(
    ("job", "place", "message"),
    [
        (
            JOB.replace("instance_type: ml.g5.12xlarge", "prefer: [ml.g5.12xlarge]"),
            "job.yaml:3",
            "has one instance type",
        ),
        (
            JOB.replace("12xlarge", "12xlarge, queue: mine"),
            "job.yaml:3",
            "a job queue takes no tuning jobs",
        ),
        (
            JOB.replace("12xlarge", "12xlarge, processes_per_instance: 2"),
            "job.yaml:3",
            "starts 4 ranks per instance",
        ),
        (
            JOB.replace("12xlarge", "12xlarge, network: {isolation: true}"),
            "job.yaml:3",
            "would share one checkpoint",
        ),
        (
            JOB + "request: {ExperimentConfig: {ExperimentName: a}}\n",
            "job.yaml:5",
            "those of training jobs",
        ),
    ],
)
def test_what_a_tuning_job_cannot_run_has_a_place(
    tmp_path: Path, job: str, place: str, message: str
) -> None:
    found = [
        str(each).replace(f"{tmp_path}/", "") for each in check_tuning(sweep_of(tmp_path, job))
    ]
    assert len(found) == 1, found
    assert found[0].startswith(place)
    assert message in found[0]


def test_a_metric_of_a_script_needs_an_expression(tmp_path: Path) -> None:
    space = {"code.args.lr": {"log_uniform": [1e-5, 0.01]}}
    wrong = sweep_of(
        tmp_path, SCRIPT, space=space, objective={"metric": "train/score", "goal": "max"}
    )
    assert "add it to metrics of the job" in str(check_tuning(wrong)[0])
    job = SCRIPT + "metrics: {score: 'score=([0-9.]+)'}\n"
    assert (
        check_tuning(
            sweep_of(tmp_path, job, space=space, objective={"metric": "train/score", "goal": "max"})
        )
        == []
    )


def test_trials_share_a_configuration_without_their_values(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, SCRIPT, space={"code.args.lr": {"log_uniform": [1e-5, 0.01]}})
    config = render_tuning(sweep, plan_of(sweep)).plan.config
    assert config.args == ["--depth", "2"]
    assert {name: value.kind for name, value in config.searched.items()} == {
        "code.args.lr": "float"
    }
    assert (
        config.processes_per_instance == 1
    )  # AWS's toolkit starts one rank on a machine without GPUs


def test_equal_sweeps_and_code_have_one_name(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, name="a-rather-long-name-of-a-sweep-indeed")
    name = tuning_name(sweep, plan_of(sweep))
    assert name == tuning_name(sweep, plan_of(sweep))
    assert len(name) <= 32
    assert name.startswith("a-rather-long-name-of-")
    others = [
        tuning_name(sweep, plan_of(sweep, "e" * 64)),
        tuning_name(sweep_of(tmp_path), plan_of(sweep)),
    ]
    others.append(tuning_name(sweep, plan_of(sweep), 2))
    assert len({name, *others}) == 4


def test_limits_of_the_model_have_a_place_in_the_sweep(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, limits={"time": "90s"})
    with pytest.raises(SpecError) as caught:
        render_tuning(sweep, plan_of(sweep))
    assert "limits.time" in str(caught.value)
    assert "AWS allows at least 120, got 90" in str(caught.value)
