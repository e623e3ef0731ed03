"""Where a plan's run saves checkpoints, and what it resumes from."""

from __future__ import annotations

from typing import Any

import pytest
from support.plans import RUN, SCRIPT_JOB, TASK_JOB, PlanOf, local, refusal

from cloudtrain.planning.storage_layout import (
    ResumeSource,
    direct_folder_of,
    resume_source,
    split_checkpoint,
    synced_folder_of,
)


def test_resume_names(plan_of: PlanOf) -> None:
    assert plan_of("checkpoint.resume=s3://bucket/x").config.checkpoint.resume == "s3://bucket/x"
    assert (
        plan_of("checkpoint.resume=/tmp/x", **local()).config.checkpoint.resume == "file:///tmp/x"
    )
    assert "cannot read a path on this machine" in refusal(plan_of, "checkpoint.resume=/tmp/x")
    assert plan_of("checkpoint.resume=never").config.checkpoint.resume == "never"
    assert "expected where to resume from" in refusal(plan_of, "checkpoint.resume=yesterday")
    other = "demo-261119-101500-aaaaaa"
    assert f"there is no run {other}" in refusal(plan_of, f"checkpoint.resume={other}")
    found = ResumeSource("s3://bucket/other", "s3://bucket/other", other)
    saved = plan_of(f"checkpoint.resume={other}", resumed=found).config.checkpoint
    assert (saved.resume, saved.resume_run) == ("s3://bucket/other", other)
    assert plan_of("checkpoint.resume=s3://bucket/x").config.checkpoint.resume_run == "", (
        "of any run"
    )
    one = plan_of("checkpoint.resume=s3://bucket/x/step-00000300-0a1b2c3d").config.checkpoint
    assert one.resume == "s3://bucket/x/step-00000300-0a1b2c3d"


def test_a_script_has_argv_and_a_synchronised_checkpoint_folder(plan_of: PlanOf) -> None:
    text = TASK_JOB.replace(
        'task: "mine:Mine", args: {layers: 4}',
        "script: train.py, args: {lr: 0.1, amp: true, x: null}",
    )
    text = text.replace("train: {epochs: 3, batch_size: 16, accumulate: 4}\n", "")
    plan = plan_of(text=text)
    assert plan.config.args == ["--lr", "0.1", "--amp"]
    assert plan.request["CheckpointConfig"] == {
        "S3Uri": f"s3://bucket/cloudtrain/{RUN}/checkpoints"
    }
    assert plan.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"


def test_isolated_containers_save_through_the_service(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.network.isolation=true", "cluster.instances=1")
    assert plan.request["EnableNetworkIsolation"] is True
    assert plan.request["CheckpointConfig"]["S3Uri"].endswith("/checkpoints")
    assert plan.config.checkpoint.uri == ""


def test_isolated_instances_cannot_share_checkpoints(plan_of: PlanOf) -> None:
    for arguments in ({}, local()):
        message = refusal(
            plan_of, "cluster.network.isolation=true", "cluster.instances=2", **arguments
        )
        assert "a Task on 2 isolated instances could not save a checkpoint" in message
        script = plan_of(
            "cluster.network.isolation=true", "cluster.instances=2", text=SCRIPT_JOB, **arguments
        )
        assert "those of all hosts in one folder" in " ".join(script.warnings)


def test_a_cluster_does_not_save_to_a_local_folder(plan_of: PlanOf) -> None:
    assert "a cluster saves checkpoints to S3" in refusal(plan_of, "checkpoint.uri=/tmp/x")


def test_never_resuming_gives_a_script_a_separate_folder(plan_of: PlanOf) -> None:
    overrides = ["checkpoint.uri=s3://bucket/saved", "checkpoint.resume=never"]
    request = plan_of(*overrides, text=SCRIPT_JOB).request
    assert request["CheckpointConfig"] == {"S3Uri": f"s3://bucket/saved/{RUN}"}
    request = plan_of(*overrides, "cluster.network.isolation=true", "cluster.instances=1").request
    assert request["CheckpointConfig"] == {"S3Uri": f"s3://bucket/saved/{RUN}"}
    assert plan_of(*overrides[:1], text=SCRIPT_JOB).request["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/saved"
    }


def test_script_with_another_checkpoint_uri_is_warned(plan_of: PlanOf) -> None:
    overrides = ["checkpoint.uri=s3://bucket/new", "checkpoint.resume=s3://bucket/old"]
    plan = plan_of(*overrides, text=SCRIPT_JOB)
    assert plan.request["CheckpointConfig"] == {"S3Uri": "s3://bucket/old"}
    assert any(
        "it resumes and saves in s3://bucket/old, not in s3://bucket/new" in warning
        for warning in plan.warnings
    )
    assert plan_of(*overrides).config.checkpoint.uri == "s3://bucket/new", (
        "a Task reads there and writes here"
    )


@pytest.mark.parametrize(
    ("synced", "steps"),
    [
        ("s3://bucket/cloudtrain/run/checkpoints", "s3://bucket/cloudtrain/run/steps/checkpoints"),
        ("s3://bucket/saved/", "s3://bucket/steps/saved"),
        ("s3://bucket", "s3://bucket/steps"),
    ],
)
def test_a_script_saves_beside_its_synced_folder(synced: str, steps: str) -> None:
    assert direct_folder_of(synced) == steps
    # A bucket without a prefix is never the synced folder.
    assert synced_folder_of(steps) == (None if synced == "s3://bucket" else synced.rstrip("/"))
    assert synced_folder_of(synced) is None


def test_the_name_of_one_checkpoint_is_split_off() -> None:
    assert split_checkpoint("s3://b/x/step-00000300-0a1b2c3d/") == (
        "s3://b/x",
        "step-00000300-0a1b2c3d",
    )
    assert split_checkpoint("s3://b/x/step-300") == ("s3://b/x/step-300", "")


def test_a_script_names_either_of_its_folders() -> None:
    synced, steps = "s3://b/run/checkpoints", "s3://b/run/steps/checkpoints"
    for uri in (synced, steps):
        assert resume_source(uri, is_synced=True) == ResumeSource(synced, steps)
        assert resume_source(f"{uri}/step-00000300", is_synced=True) == ResumeSource(
            synced, f"{steps}/step-00000300"
        )
    assert (
        resume_source(f"{synced}/step-00000300", is_synced=False).checkpoints
        == f"{synced}/step-00000300"
    )


def test_a_scripts_checkpoints_are_its_own(plan_of: PlanOf) -> None:
    plan = plan_of(text=SCRIPT_JOB)
    assert plan.request["CheckpointConfig"] == {
        "S3Uri": f"s3://bucket/cloudtrain/{RUN}/checkpoints"
    }
    assert plan.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"
    assert plan.config.checkpoint.resume == "auto"
    assert (
        plan_of("checkpoint.uri=s3://bucket/a/b", text=SCRIPT_JOB).config.checkpoint.uri
        == "s3://bucket/a/steps/b"
    )
    never = plan_of("checkpoint.uri=s3://bucket/a/b", "checkpoint.resume=never", text=SCRIPT_JOB)
    assert never.config.checkpoint.uri == f"s3://bucket/a/steps/b/{RUN}", (
        "not below another run's synced folder"
    )
    isolated = plan_of("cluster.network.isolation=true", text=SCRIPT_JOB)
    assert isolated.config.checkpoint.uri == ""


def test_a_script_that_resumes_a_run_reads_there_and_saves_here(plan_of: PlanOf) -> None:
    other = "demo-261119-101500-aaaaaa"
    base = f"s3://bucket/cloudtrain/{other}"
    found = ResumeSource(f"{base}/checkpoints", f"{base}/steps/checkpoints", other)
    saved = plan_of(f"checkpoint.resume={other}", text=SCRIPT_JOB, resumed=found)
    assert saved.request["CheckpointConfig"] == {"S3Uri": f"{base}/checkpoints"}
    assert saved.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"
    assert saved.config.checkpoint.resume == f"{base}/steps/checkpoints"
    assert saved.config.checkpoint.resume_run == other
    # Also if both have the same checkpoint.uri, which two runs that resume one run would otherwise share.
    shared = ResumeSource("s3://bucket/a/b", "s3://bucket/a/steps/b", other)
    again = plan_of(
        "checkpoint.uri=s3://bucket/a/b",
        f"checkpoint.resume={other}",
        text=SCRIPT_JOB,
        resumed=shared,
    )
    assert again.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"
    assert again.config.checkpoint.resume == "s3://bucket/a/steps/b"


def test_a_local_script_saves_to_its_folder(plan_of: PlanOf) -> None:
    plan = plan_of(text=SCRIPT_JOB, **local())
    assert plan.config.checkpoint.uri == plan.locations.checkpoints
    other = ResumeSource("file:///old", "file:///old/step-00000300", "demo-261119-101500-aaaaaa")
    resumed = plan_of("checkpoint.resume=/old", text=SCRIPT_JOB, resumed=other, **local())
    assert resumed.locations.checkpoints == "file:///old", (
        "the script finds it as /opt/ml/checkpoints"
    )
    assert resumed.config.checkpoint.uri == plan.config.checkpoint.uri
    assert resumed.config.checkpoint.resume == "file:///old/step-00000300"


def test_an_isolated_container_takes_the_newest(plan_of: PlanOf) -> None:
    overrides = (
        "cluster.network.isolation=true",
        "cluster.instances=1",
        "checkpoint.resume=s3://bucket/x/step-00000300",
    )
    assert "resumes from the newest checkpoint" in refusal(plan_of, *overrides)
    plan = plan_of(*overrides[:2], "checkpoint.resume=s3://bucket/x")
    assert (plan.config.checkpoint.uri, plan.config.checkpoint.resume) == ("", "auto")
    assert plan.request["CheckpointConfig"] == {"S3Uri": "s3://bucket/x"}


def test_every_and_keep_count_for_scripts_that_use_the_api(plan_of: PlanOf) -> None:
    (warning,) = [
        text
        for text in plan_of("checkpoint.keep=2", text=SCRIPT_JOB).warnings
        if "checkpoint.keep" in text
    ]
    assert "has an effect only where the script saves by cloudtrain_runtime.checkpoint" in warning


def test_a_last_save_that_takes_too_long_is_a_warning(plan_of: PlanOf) -> None:
    def size_warnings(*overrides: str, **arguments: Any) -> list[str]:
        return [
            text for text in plan_of(*overrides, **arguments).warnings if "checkpoint.size" in text
        ]

    assert size_warnings("checkpoint.size=45GB") == [], "2 hosts x 250 MB/s x 90 s"
    (warning,) = size_warnings("checkpoint.size=480GB")
    assert "480 GB take about 16m to upload from 2 instances at 250.0 MB/s each" in warning
    assert "leaves 90 s of its 120 s" in warning
    assert "22 instances" in warning
    assert size_warnings("checkpoint.size=480GB", "cluster.instances=22") == []
    assert size_warnings("checkpoint.size=480GB", **local()) == []
    slow = size_warnings(
        "checkpoint.size=10GB", "cluster.instance_type=ml.m5.xlarge", "cluster.instances=1"
    )
    assert slow, "half of a slow network"
