"""The check of the checkpoints that a run resumes from and saves to."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.aws_frontend import Answer, Front
from support.jobs import Cli
from support.preflight import JOB, SCRIPT, Checks, client, only_failure, put, save, start_job

import cloudtrain
from cloudtrain.runs.continuation import manifests_in
from cloudtrain.support.checks import Result
from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.storage import FolderStorage

pytestmark = pytest.mark.aws


def test_the_resumed_checkpoint_is_reported(account: Front, checks: Checks) -> None:
    save(10)
    save(20, run="newer")
    save(30, size=4)  # incomplete: a file has another size than its manifest says
    put("saved/step-00000040/model.pt", b"123")  # without a manifest
    put(f"{save(50)}/damaged.json", b"{}")  # marked as damaged
    assert checks()["checkpoints"].detail == "will resume from step 20 of run newer"
    save(30, attempt="1a2b3c4d")
    assert checks()["checkpoints"].detail == "will resume from step 30 of run other"


def test_all_readers_name_the_same_newest_checkpoint(
    account: Front, checks: Checks, tmp_path: Path
) -> None:
    """Attempts of one step have folders of their own: the one that was completed last counts."""
    save(20, run="first", time=100)
    save(20, run="last", attempt="1a2b3c4d", time=300)
    save(20, run="second", attempt="f1a2b3c4", time=200)
    save(20, run="incomplete", attempt="2b3c4d5e", time=400, size=4)
    save(10, run="later", time=500)
    s3 = client("s3")
    for listed in s3.list_objects_v2(Bucket="cloudtrain-test", Prefix="saved/")["Contents"]:
        path = tmp_path / listed["Key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file("cloudtrain-test", listed["Key"], str(path))
    in_runtime = list_checkpoints(FolderStorage(tmp_path / "saved"))
    newest_first = [record.run for record in reversed(in_runtime) if record.is_complete]
    assert newest_first == ["last", "second", "first", "later"]
    assert [each.run for each in manifests_in(tmp_path / "saved")] == newest_first
    assert checks()["checkpoints"].detail == "will resume from step 20 of run last"


def test_submit_prints_what_it_continues_from(
    account: Front, cli: Cli, job: Callable[..., Path]
) -> None:
    path = job(JOB, mine_py="class Mine(Task):\n    def __init__(self): ...\n")
    own = cloudtrain.plan(cloudtrain.validate(path)).config.training
    save(10, training={**own, "entry": "mine:Other"})
    refused = cli("submit", path)
    assert refused.code == 3
    assert (
        "another training (step 10 of run other: entry is 'mine:Other' there and 'mine:Mine' here)"
        in refused.err
    )

    save(20, run="newer", training=own)
    environ = {"CLOUDTRAIN_TRANSPORT": "boto3"}
    done = cli("submit", path, "--json", environ=environ)
    assert done.code == 0, done.err
    assert "\ncheckpoints: will resume from step 20 of run newer\n" in f"\n{done.err}"
    warning = "nothing is left to train: step 20 of run newer is the last step"
    assert f"warning: {warning}" in done.err
    assert [text for text in done.json["warnings"] if text.startswith(warning)]
    assert f"warning: {warning}" in cli("check", path, environ=environ).out

    save(30, run="oldest")
    longer = cli("submit", path, "--set", "train.epochs=9", environ=environ)
    assert longer.code == 0, longer.err
    assert "nothing is left" not in longer.err
    assert (
        "warning: step 30 of run oldest does not name its training (cloudtrain 0.1 saved it)"
        in longer.err
    )


def test_foreign_objects(account: Front, checks: Checks) -> None:
    put("saved/photo.jpg", b"1")
    failure = only_failure(checks(), "checkpoints")
    assert "such as saved/photo.jpg" in failure.detail
    assert re.search(
        r"--set checkpoint\.uri=s3://cloudtrain-test/saved/demo-\d+-\d+-\w+$", failure.fix
    )
    assert (
        checks(text=SCRIPT)["checkpoints"].result is Result.PASS
    )  # a script's checkpoints may have any name


def test_never_beside_another_runs_checkpoints(account: Front, checks: Checks) -> None:
    save(10)
    failure = only_failure(checks("checkpoint.resume=never"), "checkpoints")
    assert "holds step 10 of run other" in failure.detail


def test_the_checkpoint_folder_of_a_running_run(account: Front, checks: Checks) -> None:
    """Each run keeps the newest checkpoints of its folder, so two runs would delete each other's."""
    save(10, run="other")
    start_job("other", 1)  # ends at once, in moto
    assert "from step 10 of run other" in checks()["checkpoints"].detail
    resumed = "checkpoint.resume=s3://cloudtrain-test/saved"
    for status in ("InProgress", "Stopping"):
        account.respond(
            "DescribeTrainingJob", Answer.json({"TrainingJobStatus": status, "CreationTime": 1.0})
        )
        failure = only_failure(checks(), "checkpoints")
        assert failure.detail.startswith(
            "run other is still running and also saves to s3://cloudtrain-test/saved (step 10)"
        )
        assert "cloudtrain stop other" in failure.fix
        assert re.search(
            r"--set checkpoint\.uri=s3://cloudtrain-test/saved/demo-\d+-\d+-\w+$", failure.fix
        )
        assert only_failure(checks(resumed), "checkpoints").detail == failure.detail
        elsewhere = checks("checkpoint.uri=s3://cloudtrain-test/mine", resumed)["checkpoints"]
        assert elsewhere.result is Result.PASS  # reading while the other run writes is safe
    account.respond("DescribeTrainingJob", Answer.denied())
    assert "sagemaker:DescribeTrainingJob" in checks()["checkpoints"].detail


def test_resume_from_a_uri(account: Front, checks: Checks) -> None:
    resume = "checkpoint.resume=s3://cloudtrain-test/elsewhere"
    assert "no complete checkpoint" in only_failure(checks(resume), "checkpoints").detail
    save(7, place="elsewhere")
    assert (
        "from step 7 of run other, in s3://cloudtrain-test/elsewhere"
        in checks(resume)["checkpoints"].detail
    )
    assert checks(f"{resume}/step-00000007")["checkpoints"].result is Result.PASS
    assert checks(f"{resume}/step-00000008")["checkpoints"].result is Result.FAIL
    save(9, place="elsewhere", attempt="1a2b3c4d")
    assert "step 9" in checks(f"{resume}/step-00000009-1a2b3c4d")["checkpoints"].detail


def test_named_checkpoint_precedes_the_runs_own_folder(account: Front, checks: Checks) -> None:
    save(500)
    save(300)
    assert (
        "from step 300"
        in checks("checkpoint.resume=s3://cloudtrain-test/saved/step-00000300")[
            "checkpoints"
        ].detail
    )


def test_only_the_resumed_runs_checkpoints_count(account: Front, checks: Checks) -> None:
    other = "demo-261120-101500-1a2b3c"
    place = f"cloudtrain/{other}/checkpoints"
    save(7, place=place, run="somebody-else")
    assert (
        "no complete checkpoint"
        in only_failure(checks(f"checkpoint.resume={other}"), "checkpoints").detail
    )
    save(5, place=place, run=other)
    assert (
        f"from step 5 of run {other}" in checks(f"checkpoint.resume={other}")["checkpoints"].detail
    )


def test_a_script_that_saves_by_the_api(account: Front, checks: Checks) -> None:
    other = "demo-261120-101500-1a2b3c"
    save(7, place=f"cloudtrain/{other}/steps/checkpoints", run=other)
    found = checks(f"checkpoint.resume={other}", text=SCRIPT)["checkpoints"]
    assert (found.result, found.detail) == (
        Result.PASS,
        f"cloudtrain_runtime.checkpoint will resume from step 7 of run {other}",
    )
    put(f"cloudtrain/{other}/checkpoints/epoch-3.pt", b"1")
    assert (
        "1 object below" in checks(f"checkpoint.resume={other}", text=SCRIPT)["checkpoints"].detail
    )
    one = (
        f"checkpoint.resume=s3://cloudtrain-test/cloudtrain/{other}/steps/checkpoints/step-0000000"
    )
    assert "from step 7" in checks(f"{one}7", text=SCRIPT)["checkpoints"].detail
    assert (
        "step-00000008 to resume"
        in only_failure(checks(f"{one}8", text=SCRIPT), "checkpoints").detail
    )


def test_a_script_that_resumes_a_run_without_checkpoints(account: Front, checks: Checks) -> None:
    resume = "checkpoint.resume=demo-261120-101500-1a2b3c"
    assert (
        "no complete checkpoint" in only_failure(checks(resume, text=SCRIPT), "checkpoints").detail
    )
    isolated = checks(
        resume, "cluster.network.isolation=true", "cluster.instances=1"
    )  # SageMaker copies the checkpoints of an isolated Task, as it does for a script
    assert "no complete checkpoint" in only_failure(isolated, "checkpoints").detail
    put("cloudtrain/demo-261120-101500-1a2b3c/checkpoints/epoch-3.pt", b"1")
    assert "1 object below" in checks(resume, text=SCRIPT)["checkpoints"].detail
    elsewhere = "checkpoint.resume=s3://cloudtrain-test/nothing-there"
    assert (
        "no complete checkpoint"
        in only_failure(checks(elsewhere, text=SCRIPT), "checkpoints").detail
    )
