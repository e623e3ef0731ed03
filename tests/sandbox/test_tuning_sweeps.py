"""A sweep with the engine `sagemaker` in the sandbox: one tuning job, and trials that are ordinary runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.jobs import Cli, until
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

SCRIPT = """\
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--kind")
parser.add_argument("--depth", type=int)
given = parser.parse_args()
assert given.depth == 3 and given.kind in ("a", "b"), given
if os.environ["RANK"] == "0":
    print(f"score={given.lr + (given.kind == 'b'):.6f}")
"""
JOB = """\
name: small
code: {script: train.py, args: {lr: 0.5, depth: 3}}
cluster: {instance_type: ml.m5.large}
metrics: {score: 'score=([0-9.]+)'}
limits: {runtime: 10m}
"""
SWEEP = """\
job: job.yaml
engine: sagemaker
strategy: random
space:
  code.args.lr: {log_uniform: [1e-4, 0.1]}
  code.args.kind: {choice: [a, b]}
objective: {metric: train/score, goal: min}
trials: 4
parallel: 2
limits: {cost: 10 USD}
"""


def write(folder: Path, sweep: str = SWEEP) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(JOB)
    (folder / "sweep.yaml").write_text(sweep)
    return folder / "sweep.yaml"


def test_a_tuning_job_finds_the_best_of_four_trials(
    sandbox: Served, cli: Cli, tmp_path: Path
) -> None:
    environ = {**os.environ, **sandbox.environment}
    file = write(tmp_path)
    started = cli("sweep", "run", file, "--json", environ=environ)
    assert started.code == 0, started.err
    again = cli("sweep", "run", file, "--json", environ=environ)
    assert again.json["sweep"] == started.json["sweep"]
    done = cli("sweep", "follow", "latest", "--json", environ=environ)
    assert done.code == 0, done.err
    trials, best = done.json["trials"], done.json["best"]
    assert [trial["state"] for trial in trials] == ["SUCCEEDED"] * 4
    for trial in trials:
        values = trial["values"]
        assert trial["objective"] == pytest.approx(
            values["code.args.lr"] + (values["code.args.kind"] == "b"), abs=1e-5
        )
    assert best["objective"] == min(trial["objective"] for trial in trials)
    names = [
        each["HyperParameterTuningJobName"]
        for each in sandbox.client("sagemaker").list_hyper_parameter_tuning_jobs(
            NameContains="small-"
        )["HyperParameterTuningJobSummaries"]
    ]
    assert len(names) == 1
    assert all(trial["run"].startswith(f"{names[0]}-00") for trial in trials)
    status = cli("status", f"sagemaker:{best['run']}", "--json", environ=environ)
    assert (status.json["state"], status.json["world_size"]) == ("SUCCEEDED", 1)
    written = cli(
        "sweep", "best", "latest", "--write", tmp_path / "best.yaml", "--json", environ=environ
    )
    assert written.code == 0, written.err
    assert f"lr: {best['values']['code.args.lr']}" in (tmp_path / "best.yaml").read_text()
    described = [
        sandbox.client("sagemaker").describe_training_job(TrainingJobName=each["run"])
        for each in trials
    ]
    costs = cli("costs", "--sagemaker", "--by", "tag:sweep", "--json", environ=environ).json
    assert [run["run"] for run in costs["runs"] if run["group"] == started.json["sweep"]] == [
        f"sagemaker:{each['run']}" for each in reversed(trials)
    ]
    assert sum(
        run["billable_seconds"] for run in costs["runs"] if run["group"] == started.json["sweep"]
    ) == sum(each["BillableTimeInSeconds"] for each in described)
    stopped = cli("sweep", "stop", "latest", "--json", environ=environ)
    assert stopped.json["state"] == "SUCCEEDED"


def test_a_stop_ends_the_tuning_job_and_its_trials(
    sandbox: Served, cli: Cli, tmp_path: Path
) -> None:
    environ = {**os.environ, **sandbox.environment}
    file = write(tmp_path)
    (tmp_path / "train.py").write_text(
        "import time\nprint('score=0.5', flush=True)\ntime.sleep(600)\n"
    )
    sweep = cli("sweep", "run", file, "--json", environ=environ).json["sweep"]
    until(lambda: cli("sweep", "status", sweep, "--json", environ=environ).json["trials"])
    stopped = cli("sweep", "stop", sweep, "--json", environ=environ)
    assert stopped.code == 0, stopped.err
    ended = until(
        lambda: (
            found := cli("sweep", "status", sweep, "--json", environ=environ).json,
            found["state"] == "STOPPED" and found,
        )[1]
    )
    assert {trial["state"] for trial in ended["trials"]} == {"STOPPED"}


def test_trials_beyond_the_budget_are_refused(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path, SWEEP.replace("10 USD", "0.04 USD"))
    done = cli("sweep", "plan", file)
    assert done.code == 2
    assert "sweep.yaml:10:16  limits.cost: 4 trials reserve up to 0.0" in done.err
    assert "use trials: 1, raise it to" in done.err


def test_a_local_tuning_job_is_refused(cli: Cli, tmp_path: Path) -> None:
    done = cli("sweep", "run", write(tmp_path), "--local")
    assert done.code == 2
    assert "sweep.yaml:2:9  engine: a tuning job runs on SageMaker or in the sandbox" in done.err
