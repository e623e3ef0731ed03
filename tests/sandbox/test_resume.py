"""`resume` starts a new run from the last checkpoint of an ended run, from any machine and on any cluster."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, until
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

JOB = """\
name: NAME
code: {task: "small:Small", args: {pause: 0.1}}
cluster: {instance_type: ml.g5.xlarge, instances: 2, processes_per_instance: 1}
train: {steps: 300, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 5 steps}
limits: {runtime: 10m}
data: {extra: numbers}
"""
TASK = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Small(Task):
    def __init__(self, pause):
        self.pause = pause

    def model(self):
        assert (context().channels["extra"] / "one.txt").read_text() == "1"
        return nn.Linear(3, 1)

    def datasets(self):
        inputs = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}

    def loss(self, model, batch):
        time.sleep(self.pause)
        return F.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture
def environ(sandbox: Served) -> dict[str, str]:
    """Environment variables of a client."""
    return {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}


@pytest.fixture
def small(job: Callable[..., Path]) -> Callable[[str], Path]:
    """Return a function that writes the job with a name."""

    def write(name: str) -> Path:
        path = job(JOB.replace("NAME", name), small_py=TASK)
        (path.parent / "numbers").mkdir(exist_ok=True)
        (path.parent / "numbers" / "one.txt").write_text("1")
        return path

    return write


@pytest.mark.promise
def test_a_stopped_run_resumes_on_another_cluster(  # noqa: PLR0915 (one long scenario)
    sandbox: Served, cli: Cli, small: Callable[[str], Path], environ: dict[str, str], tmp_path: Path
) -> None:
    path = small("resumes")
    first = cli("submit", path, "--skip-check", "--json", environ=environ).json["run"]
    sandbox.secondary(first, "Training")
    until(lambda: sandbox.keys(f"cloudtrain/{first}/checkpoints/"))
    until(lambda: any("checkpoint" in line for line in sandbox.lines(first)))
    live = cli("resume", first, environ=environ)
    assert live.code == 2
    assert "only a run that has ended can be resumed" in live.err
    assert cli("stop", first, environ=environ).code == 0
    left = cli("status", first, "--json", environ=environ).json
    assert left["state"] == "STOPPED"
    assert 0 < left["last_step"] < 300

    # The other machine has neither the job file nor the code nor the data.
    shutil.rmtree(path.parent)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bare = {name: value for name, value in environ.items() if not name.startswith("CLOUDTRAIN_")}
    bare |= {"HOME": str(elsewhere), "CLOUDTRAIN_TEST_GUARD": "1", "CLOUDTRAIN_REGION": "us-west-2"}
    bare |= {"CLOUDTRAIN_TRANSPORT": "boto3", "CLOUDTRAIN_HOME": str(elsewhere / "runs")}
    there = cli("checkpoints", first, "--json", environ=bare, cwd=elsewhere)
    assert there.code == 0, there.err
    newest, before = [entry for entry in there.json["checkpoints"] if entry["state"] == "complete"][
        :2
    ]
    assert (newest["step"], newest["run"]) == (left["last_step"], first)
    assert newest["uri"].startswith(
        f"s3://{sandbox.info['bucket']}/cloudtrain/{first}/checkpoints/step-"
    )
    assert cli("checkpoints", "verify", first, environ=bare, cwd=elsewhere).code == 0
    assert (
        cli("checkpoints", newest["uri"].rpartition("/")[0], environ=bare).out.count(" complete ")
        >= 2
    )
    resume = (
        "resume",
        first,
        "--instances",
        "1",
        "--set",
        "code.args={pause: 0}",
        "--set",
        "train.learning_rate=0.01",
        "--skip-check",
        "--json",
    )
    done = cli(*resume, "--follow", environ=bare, cwd=elsewhere)
    assert done.code == 0, done.err
    second = done.json
    assert second["run"] != first
    assert second["first_step"] == left["last_step"]
    assert second["last_step"] == 300
    assert second["world_size"] == 1
    assert "resume: train.learning_rate was 0.05 and is 0.01" in done.err
    trained = cli("resume", second["run"], "--skip-check", environ=bare, cwd=elsewhere)
    assert trained.code == 2, trained.err
    assert f"{second['run']} has succeeded, and nothing is left to train: step 300" in trained.err
    resources = sandbox.describe(second["run"])["ResourceConfig"]
    assert resources["InstanceCount"] == 1
    third = cli(*resume, "--from", str(before["step"]), "--follow", environ=bare, cwd=elsewhere)
    assert third.code == 0, third.err
    assert third.json["first_step"] == before["step"]
    nowhere = cli(*resume, "--from", str(newest["step"] + 1), environ=bare, cwd=elsewhere)
    assert nowhere.code == 2
    assert f"the nearest complete: {newest['step']}" in nowhere.err

    # Expired code is reported before anything is started.
    channels = sandbox.describe(second["run"])["InputDataConfig"]
    (code,) = (
        each["DataSource"]["S3DataSource"]["S3Uri"]
        for each in channels
        if each["ChannelName"] == "code"
    )
    bucket, _, prefix = code.removeprefix("s3://").partition("/")
    for key in sandbox.keys(prefix):
        sandbox.client("s3").delete_object(Bucket=bucket, Key=key)
    ours = {"NameContains": "resumes", "MaxResults": 100}
    before = sandbox.client("sagemaker").list_training_jobs(**ours)["TrainingJobSummaries"]
    gone = cli(*resume, environ=bare, cwd=elsewhere)
    assert gone.code == 2, gone.err
    assert "the code of the earlier run was deleted from s3://" in gone.err
    assert sandbox.client("sagemaker").list_training_jobs(**ours)["TrainingJobSummaries"] == before


def test_runs_that_cannot_be_resumed_are_rejected(
    sandbox: Served, cli: Cli, small: Callable[[str], Path], environ: dict[str, str]
) -> None:
    path = small("too-early")
    sandbox.set_faults(capacity_after_seconds=600)
    run = cli("submit", path, "--skip-check", "--json", environ=environ).json["run"]
    assert cli("stop", run, environ=environ).code == 0
    sandbox.set_faults()
    done = cli("resume", run, environ=environ)
    assert done.code == 2
    assert "there is no complete checkpoint" in done.err
    assert f"cloudtrain checkpoints sagemaker:{run}" in done.err
    listed = cli("checkpoints", run, environ=environ)
    assert listed.code == 0
    assert "no checkpoints at s3://" in listed.out
    assert "--skip-check" not in done.err, "--skip-check does not skip this check"
    sandbox.create("foreign-261120-101500-1a2b3c", "true")
    sandbox.end_of("foreign-261120-101500-1a2b3c")
    foreign = cli("resume", "foreign-261120-101500-1a2b3c", environ=environ)
    assert foreign.code == 2
    assert "was not submitted by cloudtrain" in foreign.err
    wrong = cli("resume", run, "--set", "cluster.instnces=3", environ=environ)
    assert wrong.code == 2
    assert 'did you mean "instances"' in wrong.err
    other = cli("resume", run, "--set", "code.task=other:Task", environ=environ)
    assert other.code == 2
    assert "code.task: task cannot change: the code is the bundle of" in other.err
    plan = sandbox.client("s3")
    key = f"cloudtrain/{run}/plan.json"
    for text in (b"{}", b"not JSON", b'{"run": "x", "job": {"name": "y"}}'):
        plan.put_object(Bucket=sandbox.info["bucket"], Key=key, Body=text)
        damaged = cli("resume", run, environ=environ)
        assert damaged.code == 2
        assert "does not contain the job" in damaged.err


def test_a_local_run_is_resumed_on_this_machine(cli: Cli, small: Callable[[str], Path]) -> None:
    path = small("here")
    first = cli("submit", path, "--local", "--json", "--instances", "1").json["run"]
    until(lambda: (cli("status", first, "--json").json["last_checkpoint"] or {}).get("step"))
    assert cli("stop", first).code == 0
    left = cli("status", first, "--json").json
    assert left["last_step"] < 300
    (path.parent / "small.py").unlink()  # the resumed run uses the code bundle
    changed = ("--set", "code.args.pause=0", "--set", "train.learning_rate=0.01")
    done = cli("resume", first, *changed, "--follow", "--json")
    assert done.code == 0, done.err
    assert "resume: train.learning_rate was 0.05 and is 0.01: used from the first step" in done.err
    rates = cli("metrics", done.json["run"], "--json").json["metrics"]["train/learning_rate"]
    assert rates[0]["value"] == rates[-1]["value"] == 0.01
    assert done.json["first_step"] == left["last_step"]
    assert done.json["last_step"] == 300
    assert done.json["backend"] == "local"


def test_submit_can_wait_for_capacity(
    sandbox: Served, cli: Cli, small: Callable[[str], Path], environ: dict[str, str], tmp_path: Path
) -> None:
    """Jobs fail with CapacityError at least once. Then there is capacity."""

    def clear_after_a_failure() -> None:
        client = sandbox.client("sagemaker")
        failed = {"NameContains": "retried-", "StatusEquals": "Failed"}
        until(lambda: client.list_training_jobs(**failed)["TrainingJobSummaries"])
        sandbox.set_faults()

    path = small("retried")
    home = tmp_path / "runs-home" / "sandbox"
    home.mkdir(parents=True)
    info = {**sandbox.info, "process": sandbox.process.pid}
    (home / "sandbox.json").write_text(json.dumps(info))
    import fcntl

    with (home / "sandbox.json").open("r+") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # marks the sandbox as running; pauses are short for a sandbox
        sandbox.set_faults(capacity_error_after_seconds=0.3)
        clearing = threading.Thread(target=clear_after_a_failure)
        clearing.start()
        done = cli(
            "submit", path, "--sandbox", "--wait-for-capacity", "2m", "--json", environ=environ
        )
        clearing.join()
    assert done.code == 0, done.err
    assert "no capacity yet: CapacityError" in done.err
    assert f"stop sandbox:{done.json['run']}" in done.err.partition(" submitted")[0], (
        "printed before the wait"
    )
    assert done.json["state"] in ("RUNNING", "SUCCEEDED")
    jobs = sandbox.client("sagemaker").list_training_jobs(NameContains="retried-")[
        "TrainingJobSummaries"
    ]
    assert [job["TrainingJobStatus"] for job in jobs].count("Failed") >= 1
    assert len([job for job in jobs if job["TrainingJobStatus"] != "Failed"]) == 1
    cli("stop", f"sagemaker:{done.json['run']}", environ=environ)


def test_user_errors_are_not_retried(
    sandbox: Served, cli: Cli, small: Callable[[str], Path], environ: dict[str, str]
) -> None:
    path = small("not-again")
    path.write_text(path.read_text().replace("{pause: 0.1}", "{pause: nonsense}"))
    submit = ("submit", path, "--skip-check", "--wait-for-capacity", "2m", "--follow", "--json")
    done = cli(*submit, environ=environ)
    assert done.code == 4
    jobs = sandbox.client("sagemaker").list_training_jobs(NameContains="not-again")[
        "TrainingJobSummaries"
    ]
    assert len(jobs) == 1
    assert "no capacity yet" not in done.err


def test_no_capacity_in_time_exits_with_3(
    sandbox: Served, cli: Cli, small: Callable[[str], Path], environ: dict[str, Any]
) -> None:
    path = small("no-room")
    sandbox.set_faults(capacity_error_after_seconds=0.1)
    done = cli("submit", path, "--skip-check", "--wait-for-capacity", "1s", environ=environ)
    assert done.code == 3
    assert "no capacity in 1s: CapacityError" in done.err
    assert "cluster.prefer" in done.err
    bad = cli("submit", path, "--wait-for-capacity", "soon", environ=environ)
    assert bad.code == 2
    assert "expected a duration" in bad.err
