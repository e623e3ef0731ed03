"""Receipts of rehearsals: for what they hold, and what plan and submit do with them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from support.jobs import Cli

import cloudtrain
from cloudtrain.client.receipts import (
    RECEIPT_FILE,
    Receipt,
    add_receipt,
    read_receipt,
    receipt_path,
    write_receipt,
)
from cloudtrain.features.rehearsal.rehearse import (
    check_beside,
    keep_receipt,
    make_receipt,
)
from cloudtrain.features.rehearsal.report import REQUIRED, judge
from cloudtrain.job.spec import load_job
from cloudtrain.support.checks import Check, Result

JOB = """\
name: small
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
limits: {runtime: 1h, require_rehearsal: true}
"""
TRAINING_PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
RESERVED = f"{{instance_type: ml.p5.48xlarge, training_plan: '{TRAINING_PLAN}'}}"
SCRIPT = "import torch.distributed\nprint('step')\n"
PROVEN = [Check(name, Result.PASS, "shown") for name in REQUIRED]

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


def test_a_receipt_holds_for_name_account_and_start(
    rehearsed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(rehearsed)
    assert shown(rehearsed, "name=other")
    assert shown(rehearsed, "checkpoint.resume=s3://bucket/other/checkpoints")
    monkeypatch.setenv("CLOUDTRAIN_BUCKET", "my-bucket")
    monkeypatch.setenv("CLOUDTRAIN_REGION", "eu-west-1")
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "arn:aws:iam::123456789012:role/r")
    assert shown(rehearsed)


@pytest.mark.promise
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


def test_the_job_files_name_and_comments_do_not_matter(rehearsed: Path) -> None:
    rehearsed.write_text("# A comment.\n" + JOB.replace("name: small", "name:   other"))
    assert shown(rehearsed)
    renamed = rehearsed.rename(rehearsed.with_name("first.yaml"))
    assert shown(renamed)
    renamed.write_text(JOB.replace("runtime: 1h", "runtime: 2h"))
    assert shown(renamed) is None
    renamed.write_text(JOB)
    renamed.with_name("other.yaml").write_text("a: 1\n")  # the script may read it
    assert shown(renamed) is None


@pytest.mark.parametrize(
    "change", ["", "[]", '{"version": 1}', "\0", "brilliant", "version", "date"]
)
def test_a_file_that_is_no_receipt_is_named(rehearsed: Path, change: str) -> None:
    path = rehearsed.with_name(RECEIPT_FILE)
    good = path.read_text()
    wrong = {
        "brilliant": good.replace('"verdict": "proven"', '"verdict": "brilliant"'),
        "version": good.replace('"version": 1', '"version": 2'),
        "date": good.replace("+00:00", ""),
    }
    path.write_text(wrong.get(change, change))
    assert path.read_text() != good
    plan = cloudtrain.plan(rehearsed)
    assert plan.rehearsal is None
    assert [each for each in plan.warnings if str(path) in each and "it is ignored" in each]


def receipts(path: Path) -> tuple[Receipt, Receipt, Receipt]:
    """Return a proven receipt, a later one that is unknown, and one that has failed still later."""
    proven = read_receipt(path.with_name(RECEIPT_FILE))
    assert proven is not None
    unknown = dataclasses.replace(proven, verdict="unknown", date=proven.date + timedelta(hours=1))
    return (
        proven,
        unknown,
        dataclasses.replace(proven, verdict="failed", date=proven.date + timedelta(hours=2)),
    )


def test_an_unknown_receipt_replaces_no_proven_one(rehearsed: Path, tmp_path: Path) -> None:
    proven, unknown, failed = receipts(rehearsed)
    home, beside = tmp_path / "home", rehearsed.parent
    stored = receipt_path(home, proven.digest)
    warnings = keep_receipt(unknown, home, beside)
    assert [read_receipt(stored), read_receipt(beside / RECEIPT_FILE)] == [proven, proven]
    assert "stays as it was: proven" in warnings[0]
    assert keep_receipt(failed, home, None) == ()
    assert read_receipt(stored) == failed
    assert (
        keep_receipt(dataclasses.replace(proven, date=failed.date + timedelta(hours=1)), home, None)
        == ()
    )
    assert getattr(read_receipt(stored), "verdict", None) == "proven"


def test_of_several_receipts_the_newest_result_counts(rehearsed: Path, tmp_path: Path) -> None:
    proven, unknown, failed = receipts(rehearsed)
    loaded, home = load_job(rehearsed), tmp_path / "home"
    plan = cloudtrain.plan(loaded)
    for stored, verdict in ((unknown, "proven"), (failed, "failed"), (proven, "proven")):
        write_receipt(receipt_path(home, proven.digest), stored)
        assert (add_receipt(plan, loaded, home).rehearsal or {})["verdict"] == verdict


def test_a_receipt_that_cannot_be_written_is_a_warning(rehearsed: Path, tmp_path: Path) -> None:
    proven, _, _ = receipts(rehearsed)
    home = tmp_path / "home"
    taken = receipt_path(home, proven.digest).parent
    taken.parent.mkdir(parents=True)
    taken.write_text("")
    rehearsed.with_name(RECEIPT_FILE).unlink()
    (warning,) = keep_receipt(proven, home, rehearsed.parent)
    assert str(taken / RECEIPT_FILE) in warning
    assert read_receipt(rehearsed.with_name(RECEIPT_FILE)) == proven


def test_save_is_refused_over_a_file_of_the_user(cli: Cli, rehearsed: Path) -> None:
    check_beside(rehearsed.parent)
    path = rehearsed.with_name(RECEIPT_FILE)
    path.write_text('{"play": "Hamlet"}')
    done = cli(
        "rehearse", rehearsed, "--save", environ={"CLOUDTRAIN_HOME": str(path.parent / "home")}
    )
    assert (done.code, path.read_text()) == (2, '{"play": "Hamlet"}')
    assert "--save would replace it" in done.err
    assert "rehearsal:" not in done.err  # nothing was started


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_save_into_a_read_only_folder_is_refused_first(rehearsed: Path) -> None:
    rehearsed.parent.chmod(0o500)
    try:
        with pytest.raises(cloudtrain.UserError, match="cannot be written"):
            check_beside(rehearsed.parent)
    finally:
        rehearsed.parent.chmod(0o700)


@pytest.mark.promise
def test_a_required_rehearsal_stops_a_submit(rehearsed: Path, tmp_path: Path) -> None:
    loaded = load_job(rehearsed)
    home = tmp_path / "home"
    plan = cloudtrain.plan(loaded)
    assert add_receipt(plan, loaded, home, is_submit=True).rehearsal
    failed = [*PROVEN[1:], Check("starts", Result.UNKNOWN, "no Python 3.12")]
    write_receipt(
        rehearsed.with_name(RECEIPT_FILE),
        make_receipt(plan, failed, str(judge(failed)), backend="local", seed=1),
    )
    with pytest.raises(cloudtrain.UserError, match=r"it was unknown on .*starts unknown") as error:
        add_receipt(plan, loaded, home, is_submit=True)
    assert f"cloudtrain rehearse {rehearsed}" in error.value.hint


def test_a_submit_without_a_required_receipt_ends_with_2(cli: Cli, job: WriteJob) -> None:
    path = job(JOB, train_py=SCRIPT)
    account = {
        "ROLE": "arn:aws:iam::123456789012:role/r",
        "BUCKET": "my-bucket",
        "REGION": "us-west-2",
    }
    keys = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    options = ("--instances", "3", "--set", "code.env.A=a b")
    environ = {**{f"CLOUDTRAIN_{name}": value for name, value in account.items()}, **keys}
    done = cli("submit", path, *options, environ=environ)
    assert (done.code, done.out) == (2, "")
    assert f"run: cloudtrain rehearse {path} --instances 3 --set 'code.env.A=a b'" in done.err


def test_a_plan_prints_its_receipt(cli: Cli, rehearsed: Path) -> None:
    rows = [line.split() for line in cli("plan", rehearsed).out.splitlines()]
    assert [row[1:3] for row in rows if row[:1] == ["rehearsal"]] == [["proven", "on"]]
    rehearsed.with_name(RECEIPT_FILE).unlink()
    assert "\nrehearsal     none for this" in cli("plan", rehearsed).out
    cheap = (
        "--set",
        "limits.require_rehearsal=false",
        "--set",
        "cluster.instance_type=ml.g5.xlarge",
    )
    assert "\nrehearsal" not in cli("plan", rehearsed, *cheap).out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["cluster.spot=true"], "spot"),
        (["limits.runtime=48h"], "may cost 2,4"),
        (["cluster.instance_type=ml.g5.xlarge"], ""),
        (
            ["cluster={instance_type: ml.p6-b200.48xlarge, instances: 16}", "limits.runtime=24h"],
            "it may use 3,080 accelerator hours, whose price is unknown",
        ),
        (
            ["cluster={prefer: [ml.p4d.24xlarge, ml.p4de.24xlarge]}", "limits.runtime=24h"],
            "it may use 192 accelerator hours, whose price is unknown",
        ),
        (
            [f"cluster={RESERVED}", "limits.runtime=24h"],
            "it may use 192 accelerator hours, which a training plan pays",
        ),
        (["cluster={instance_type: ml.p6-b200.48xlarge}", "limits.runtime=1h"], ""),
        (["cluster={instance_type: ml.g7.2xlarge, instances: 4}", "limits.runtime=24h"], ""),
    ],
)
def test_long_costly_and_spot_jobs_get_a_warning(
    job: WriteJob, changes: list[str], reason: str
) -> None:
    path = job(JOB.replace(", require_rehearsal: true", ""), train_py=SCRIPT)
    warnings = [
        each for each in cloudtrain.plan(load_job(path, changes)).warnings if "rehearse" in each
    ]
    assert bool(warnings) == bool(reason)
    assert all(reason in each for each in warnings)


def test_a_verdict_needs_five_proven_checks() -> None:
    assert judge(PROVEN) is Result.PASS
    assert judge(PROVEN[1:]) is Result.UNKNOWN
    assert judge([*PROVEN, Check("elastic", Result.UNKNOWN, "")]) is Result.PASS
    assert judge([*PROVEN, Check("starts", Result.UNKNOWN, "")]) is Result.UNKNOWN
    assert judge([*PROVEN, Check("samples", Result.FAIL, "")]) is Result.FAIL


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
    assert (
        cli("rehearse", path, "--set", "limits.require_rehearsal=true", environ=environ).code == 4
    )
    left = [
        each.name
        for each in (path.parent / "home" / "rehearsals").iterdir()
        if each.name.startswith("run-")
    ]
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
