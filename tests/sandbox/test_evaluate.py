"""`cloudtrain evaluate` of a training job: as a job of the account, and of its weights on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"


def test_an_evaluation_is_a_job_or_runs_here(sandbox: Served, cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "job"  # the user's record of runs must not be in it
    folder.mkdir()
    for name in ("small.py", "job.yaml"):
        shutil.copy(GOLDEN / name, folder)
    home = {"CLOUDTRAIN_HOME": str(tmp_path / "home")}
    environ = {**os.environ, **sandbox.environment, **home, "CLOUDTRAIN_TRANSPORT": "boto3"}
    submit = ("submit", folder / "job.yaml", "--set", "checkpoint.uri=null", "--follow", "--json")
    trained = cli(*submit, environ=environ)
    assert trained.code == 0, trained.err
    run = trained.json["run"]
    shutil.rmtree(tmp_path / "home")  # the code is in S3, too
    found = [
        cli("evaluate", run, *where, "--json", environ=environ) for where in ((), ("--local",))
    ]
    assert [each.code for each in found] == [0, 0], [each.err for each in found]
    (job,), (here,) = (each.json["evaluations"] for each in found)
    (losses,) = {each["splits"]["train"]["metrics"]["loss"]["value"] for each in (job, here)}
    assert losses > 0
    assert (
        job["weights"]
        == here["weights"]
        == sandbox.describe(run)["ModelArtifacts"]["S3ModelArtifacts"]
    )
    assert sandbox.describe(job["run"])["TrainingJobStatus"] == "Completed"
    shown = cli("compare", run, f"local:{here['run']}", "--json", environ=environ).json["metrics"]
    assert any(
        each["metric"] == "evaluated train/loss" and each["best"][0] == losses for each in shown
    )
