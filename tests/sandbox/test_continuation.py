"""Runs on a cluster that share a checkpoint URI in S3."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"


def test_runs_that_share_a_uri_keep_their_trainings_apart(
    sandbox: Served, cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "job"  # the user's record of runs must not be in it
    folder.mkdir()
    for name in ("small.py", "job.yaml"):
        shutil.copy(GOLDEN / name, folder)
    environ = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    uri = f"s3://{sandbox.info['bucket']}/shared-by-runs"
    submit = ("submit", folder / "job.yaml", "--set", f"checkpoint.uri={uri}")
    first = cli(*submit, "--follow", "--json", environ=environ)
    assert (first.code, first.json["last_step"]) == (0, 4), first.err
    run = first.json["run"]

    def started() -> list[str]:
        jobs = sandbox.client("sagemaker").list_training_jobs(NameContains="golden", MaxResults=100)
        return [job["TrainingJobName"] for job in jobs["TrainingJobSummaries"]]

    before = started(), sandbox.keys("")
    other = ("--set", "train.seed=1", "--set", "train.learning_rate=0.5")
    refused = cli(*submit, *other, environ=environ)
    assert refused.code == 3
    assert (
        "train.learning_rate is 0.05 there and 0.5 here, train.seed is the default there and 1 here"
        in refused.err
    )
    assert (
        f"--set checkpoint.resume={run}; to start from scratch: --set checkpoint.uri={uri}/"
        in refused.err
    )
    assert (started(), sandbox.keys("")) == before, "nothing is uploaded or started"
    unasked = cli(*submit, *other, "--skip-check", "--json", environ=environ).json["run"]

    longer = cli(*submit, "--set", "train.steps=6", "--follow", "--json", environ=environ)
    assert (longer.code, longer.json["first_step"], longer.json["last_step"]) == (0, 4, 6), (
        longer.err
    )
    assert f"checkpoints: will resume from step 4 of run {run}\n" in longer.err
    sandbox.end_of(unasked)
    ended = cli("status", unasked, "--json", environ=environ).json
    assert ended["state"] == "FAILED"
    assert "train.learning_rate is 0.05 there and 0.5 here" in ended["reason"]
    assert f"checkpoint.resume={run}" in cli("explain", unasked, environ=environ).out
    saved = cli("checkpoints", uri, "--json", environ=environ).json["checkpoints"]
    assert {entry["run"]: entry["step"] for entry in saved} == {run: 4, longer.json["run"]: 6}, (
        "none is deleted"
    )
