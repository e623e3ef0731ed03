"""Receipts of rehearsals: for what they hold, and what plan and submit do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

import cloudtrain
from cloudtrain.client.rehearsing import add_receipt, make_receipt
from cloudtrain.job.spec import load_job
from cloudtrain.rehearsal.base import Check, Result
from cloudtrain.rehearsal.receipt import RECEIPT_FILE, write_receipt
from cloudtrain.rehearsal.report import REQUIRED, judge

JOB = """\
name: small
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
limits: {runtime: 1h, require_rehearsal: true}
"""
SCRIPT = "import torch.distributed\nprint('step')\n"
PROVEN = [Check(name, Result.PROVEN, "shown") for name in REQUIRED]

WriteJob = Callable[..., Path]


@pytest.fixture
def rehearsed(job: WriteJob) -> Path:
    """Return a job file with the receipt of a proven rehearsal beside it."""
    path = job(JOB, train_py=SCRIPT)
    receipt = make_receipt(cloudtrain.plan(path), PROVEN, "proven", backend="local", seed=1)
    write_receipt(path.with_name(RECEIPT_FILE), receipt)
    return path


def shown(path: Path, *changes: str, instances: int | None = None) -> object:
    """Return the receipt that a plan shows."""
    return cloudtrain.plan(load_job(path, changes, instances=instances)).rehearsal


def test_a_receipt_holds_for_name_account_and_start(rehearsed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(rehearsed)
    assert shown(rehearsed, "name=other")
    assert shown(rehearsed, "checkpoint.resume=s3://bucket/other/checkpoints")
    monkeypatch.setenv("CLOUDTRAIN_BUCKET", "my-bucket")
    monkeypatch.setenv("CLOUDTRAIN_REGION", "eu-west-1")
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "arn:aws:iam::123456789012:role/r")
    assert shown(rehearsed)


@pytest.mark.parametrize(
    "change",
    [
        "code.env.A=1",
        "limits.runtime=2h",
        "cluster.volume=50GB",
        "code.args.lr=0.1",
        "tags.team=a",
        "cluster.spot=true",
    ],
)
def test_a_changed_field_makes_a_receipt_invalid(rehearsed: Path, change: str) -> None:
    assert shown(rehearsed, change) is None


def test_changed_code_or_instances_need_a_new_receipt(rehearsed: Path) -> None:
    assert shown(rehearsed, instances=3) is None
    assert shown(rehearsed, instances=2)
    rehearsed.with_name("train.py").write_text(SCRIPT + "print('more')\n")
    assert shown(rehearsed) is None


def test_a_file_that_is_no_receipt_is_ignored(rehearsed: Path) -> None:
    for text in ("", "[]", '{"version": 1}', "\0"):
        rehearsed.with_name(RECEIPT_FILE).write_text(text)
        assert shown(rehearsed) is None


def test_a_required_rehearsal_stops_a_submit(rehearsed: Path, tmp_path: Path) -> None:
    loaded = load_job(rehearsed)
    home = tmp_path / "home"
    plan = cloudtrain.plan(loaded)
    assert add_receipt(plan, loaded, home, is_submit=True).rehearsal
    failed = [*PROVEN[1:], Check("starts", Result.UNKNOWN, "no Python 3.12")]
    write_receipt(
        rehearsed.with_name(RECEIPT_FILE), make_receipt(plan, failed, str(judge(failed)), backend="local", seed=1)
    )
    with pytest.raises(cloudtrain.UserError, match=r"it was unknown on .*starts unknown") as error:
        add_receipt(plan, loaded, home, is_submit=True)
    assert "cloudtrain rehearse JOB --instances 2" in error.value.hint


def test_a_submit_without_a_required_receipt_ends_with_2(cli: Cli, job: WriteJob) -> None:
    path = job(JOB, train_py=SCRIPT)
    account = {"ROLE": "arn:aws:iam::123456789012:role/r", "BUCKET": "my-bucket", "REGION": "us-west-2"}
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    done = cli("submit", path, environ={**{f"CLOUDTRAIN_{name}": value for name, value in account.items()}, **keys})
    assert (done.code, done.out) == (2, "")
    assert "run: cloudtrain rehearse JOB --instances 2" in done.err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["cluster.spot=true"], "spot"),
        (["limits.runtime=48h"], "may cost 2,4"),
        (["cluster.instance_type=ml.g5.xlarge"], ""),
    ],
)
def test_long_costly_and_spot_jobs_get_a_warning(job: WriteJob, changes: list[str], reason: str) -> None:
    path = job(JOB.replace(", require_rehearsal: true", ""), train_py=SCRIPT)
    warnings = [each for each in cloudtrain.plan(load_job(path, changes)).warnings if "rehearse" in each]
    assert bool(warnings) == bool(reason)
    assert all(reason in each for each in warnings)


def test_a_verdict_needs_five_proven_checks() -> None:
    assert judge(PROVEN) is Result.PROVEN
    assert judge(PROVEN[1:]) is Result.UNKNOWN
    assert judge([*PROVEN, Check("elastic", Result.UNKNOWN, "")]) is Result.PROVEN
    assert judge([*PROVEN, Check("starts", Result.UNKNOWN, "")]) is Result.UNKNOWN
    assert judge([*PROVEN, Check("samples", Result.FAILED, "")]) is Result.FAILED


def test_an_unknown_verdict_ends_with_4_only_if_required(cli: Cli, job: WriteJob) -> None:
    # The layout needs more ranks than a rehearsal starts, so nothing is run.
    text = """\
name: wide
code: {task: "wide:Wide"}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {steps: 5, batch_size: 4, learning_rate: 0.1, parallel: {data: fsdp, shard: 16}}
"""
    path = job(text, wide_py=TASK)
    environ = {"CLOUDTRAIN_HOME": str(path.parent / "home")}
    done = cli("rehearse", path, "--json", environ=environ)
    assert (done.code, done.json["verdict"]) == (0, "unknown"), done.err
    assert done.json["receipt"]["verdict"] == "unknown"
    assert cli("rehearse", path, "--set", "limits.require_rehearsal=true", environ=environ).code == 4
    left = [each.name for each in (path.parent / "home" / "rehearsals").iterdir() if each.name.startswith("run-")]
    assert left == []


TASK = """\
from torch import nn
from cloudtrain_runtime import Task


class Wide(Task):
    def model(self):
        return nn.Linear(2, 1)

    def datasets(self):
        return {"train": [0, 1]}

    def loss(self, model, batch):
        return model(batch).sum()
"""
