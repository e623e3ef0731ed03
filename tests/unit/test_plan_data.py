"""Plans of file systems, outputs, notifications and private registries."""

from __future__ import annotations

import dataclasses

import pytest
from support.plans import RUN, SCRIPT_JOB, SETTINGS, PlanOf, local, refusal

from cloudtrain.console.plans import print_plan
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run_files import PLAN, read_fields
from cloudtrain.settings.settings import Settings

NETWORK = "cluster.network={subnets: [subnet-1], security_groups: [sg-1]}"
LUSTRE = "data.train={fsx: fs-0123456789abcdef0, path: /fsx/tokens}"
NETWORKED = dataclasses.replace(SETTINGS, subnets=("subnet-9",), security_groups=("sg-9",))


def test_a_file_system_is_mounted(plan_of: PlanOf, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(LUSTRE, "data.scratch={efs: fs-89abcdef, mount: rw}", settings=NETWORKED)
    sources = {each["ChannelName"]: each["DataSource"] for each in plan.request["InputDataConfig"]}
    assert sources["train"] == {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789abcdef0",
            "FileSystemType": "FSxLustre",
            "DirectoryPath": "/fsx/tokens",
            "FileSystemAccessMode": "ro",
        }
    }
    assert sources["scratch"]["FileSystemDataSource"]["FileSystemAccessMode"] == "rw"
    assert plan.config.training["data"]["train"] == "fsx://fs-0123456789abcdef0/fsx/tokens"
    print_plan(plan)
    shown = capsys.readouterr().out
    assert "train from FSxLustre fs-0123456789abcdef0 /fsx/tokens, mounted read-only" in shown
    assert "scratch from EFS fs-89abcdef /, mounted writable" in shown


@pytest.mark.parametrize(
    ("channel", "expected"),
    [
        (
            "{fsx: fs-01234567, uri: s3://bucket/x}",
            "data.train: give exactly one of uri, fsx and efs",
        ),
        (
            "{}",
            "data.train: give exactly one of uri, fsx and efs; for example uri: s3://bucket/prefix",
        ),
        (
            "{fsx: mine}",
            'data.train.fsx: expected the id of a file system, such as fs-0123456789abcdef0, got "mine"',
        ),
        (
            "{fsx: fs-01234567}",
            "data.train.path: expected a folder that begins with the file system's mount name",
        ),
        (
            "{efs: fs-01234567, path: tokens}",
            'data.train.path: expected an absolute path, got "tokens"; write /tokens',
        ),
        (
            "{efs: fs-01234567, mode: FastFile}",
            "data.train.mode: is for data in S3; a file system is mounted",
        ),
        (
            "{efs: fs-01234567, sharded: true}",
            "data.train.sharded: is for data in S3; a file system is mounted",
        ),
        ("{efs: fs-01234567, mount: all}", 'data.train.mount: expected one of ro, rw, got "all"'),
        (
            "{uri: s3://bucket/x, path: /a}",
            "data.train.path: is for file systems only (fsx, efs); remove it",
        ),
    ],
)
def test_a_wrong_file_system_is_refused(plan_of: PlanOf, channel: str, expected: str) -> None:
    assert expected in refusal(plan_of, f"data.train={channel}", settings=NETWORKED)


def test_a_file_system_needs_the_jobs_network(plan_of: PlanOf) -> None:
    found = refusal(plan_of, LUSTRE)
    assert (
        "data.train.fsx: a file system is mounted through the job's subnets, and it has none; give cluster.net"
        in found
    )
    warnings = plan_of(LUSTRE, settings=Settings()).warnings
    assert any("data.train.fsx: a file system is mounted" in warning for warning in warnings)
    assert plan_of(LUSTRE, NETWORK).warnings == plan_of(NETWORK).warnings


def test_a_local_run_needs_a_folder_instead(plan_of: PlanOf) -> None:
    found = refusal(plan_of, LUSTRE, **local())
    assert (
        "data.train.fsx: a local run cannot mount a file system; use a folder here: --set data.train=FOLDER"
        in found
    )


def test_a_resumed_run_mounts_the_same_file_system(plan_of: PlanOf) -> None:
    plan = plan_of(
        LUSTRE, "data.more=s3://bucket/more", "output.uri=s3://models/here", settings=NETWORKED
    )
    previous = PreviousRun({**plan.to_json(), "job": plan.job_document, "run": RUN})
    job = previous.job()
    assert job.data["train"].fsx == "fs-0123456789abcdef0"
    assert job.data["train"].path == "/fsx/tokens"
    assert job.data["more"].uri == "s3://bucket/more"
    settings = previous.settings(SETTINGS)
    assert (settings.bucket, settings.prefix) == ("bucket", "cloudtrain"), "not those of output.uri"
    assert len(read_fields(plan.to_json(), PLAN)["request"]["InputDataConfig"]) == 4


@pytest.mark.parametrize(
    ("sweep", "changes", "expected"),
    [
        ("s-261128-101500-1a2b3c", (), {"team": "vision"}),
        ("mine", (), {"team": "vision", "sweep": "mine", "trial": "3"}),
        (
            "s-261128-101500-1a2b3c",
            ('tags.sweep="s"', 'tags.trial="4"'),
            {"team": "vision", "sweep": "s", "trial": "4"},
        ),
    ],
)
def test_a_resumed_trial_is_no_trial(
    plan_of: PlanOf, sweep: str, changes: tuple[str, ...], expected: dict[str, str]
) -> None:
    """A sweep that continues a trial sets its tags again; tags of users stay."""
    plan = plan_of(f"tags={{team: vision, sweep: {sweep}, trial: '3'}}")
    previous = PreviousRun({**plan.to_json(), "job": plan.job_document, "run": RUN})
    assert previous.job(changes).tags == expected


def test_outputs_are_stored_elsewhere_and_unpacked(plan_of: PlanOf) -> None:
    plan = plan_of("output={uri: s3://models/here/, compress: false}")
    assert plan.request["OutputDataConfig"] == {
        "S3OutputPath": "s3://models/here",
        "CompressionType": "NONE",
    }
    assert plan.locations.base == "s3://bucket/cloudtrain", (
        "the submit locks stay in the settings' bucket"
    )
    assert plan.locations.checkpoints == f"s3://bucket/cloudtrain/{RUN}/checkpoints"
    assert plan_of("output={compress: true}").request == plan_of().request
    assert any(
        "output.uri is ignored" in each
        for each in plan_of("output.uri=s3://models", **local()).warnings
    )


@pytest.mark.parametrize("uri", ["models", "/models", "gs://models/x", "s3://Models/x"])
def test_outputs_are_in_s3(plan_of: PlanOf, uri: str) -> None:
    found = refusal(plan_of, f"output.uri={uri}")
    assert (
        f'output.uri: expected s3://bucket/prefix, got "{uri}"; for example s3://my-bucket/models'
        in found
    )
    assert len(found.splitlines()) == 1


def test_too_long_an_output_names_its_field(plan_of: PlanOf) -> None:
    assert "output.uri: AWS allows at most 1024 characters" in refusal(
        plan_of, f"output.uri=s3://bucket/{'k' * 1100}"
    )


def test_a_notification_is_a_tag(plan_of: PlanOf) -> None:
    topic = "arn:aws:sns:us-west-2:123456789012:training"
    plan = plan_of(f"notify.sns={topic}")
    assert {"Key": "cloudtrain:notify", "Value": topic} in plan.request["Tags"]
    assert any(
        "notify: the run has the tag cloudtrain:notify; the EventBridge rule" in each
        for each in plan.decisions
    )
    queued = plan_of(f"notify.sns={topic}", "cluster.queue=q")
    assert any("notify: AWS Batch does not document" in warning for warning in queued.warnings)
    assert 'notify.sns: expected the ARN of an SNS topic, got "team"' in refusal(
        plan_of, "notify.sns=team"
    )
    assert "notify.sns: required field is missing" in refusal(plan_of, "notify={}")


def test_a_private_registry_needs_the_jobs_network(plan_of: PlanOf) -> None:
    arn = "arn:aws:lambda:us-west-2:123456789012:function:login"
    image = f"cluster.image={{uri: registry.example.com/train:1, private_registry: {{credentials: '{arn}'}}}}"
    plan = plan_of(image, settings=NETWORKED)
    assert plan.image == "registry.example.com/train:1"
    assert plan.request["AlgorithmSpecification"]["TrainingImageConfig"] == {
        "TrainingRepositoryAccessMode": "Vpc",
        "TrainingRepositoryAuthConfig": {"TrainingRepositoryCredentialsProviderArn": arn},
    }
    assert "private_registry: SageMaker pulls this image through the job's subnets" in refusal(
        plan_of, image
    )
    wrong = "cluster.image={uri: registry/train, private_registry: {credentials: me}}"
    assert "credentials: expected the ARN of a Lambda function" in refusal(
        plan_of, wrong, settings=NETWORKED
    )
    in_ecr = "cluster.image={uri: public.ecr.aws/a/train:1, private_registry: {}}"
    assert "private_registry: the image is in ECR, which needs" in refusal(
        plan_of, in_ecr, settings=NETWORKED
    )
    assert "cluster.image.uri: required field is missing" in refusal(
        plan_of, "cluster.image={private_registry: {}}"
    )


def test_an_image_of_the_public_registry_is_accepted(plan_of: PlanOf) -> None:
    base = "cluster.image=public.ecr.aws/deep-learning-containers/pytorch"
    plan = plan_of(f"{base}:2.13-cu133-amzn2023-sagemaker")
    assert plan.request["AlgorithmSpecification"]["TrainingImage"].startswith(
        "public.ecr.aws/deep-learning-containers/"
    )
    assert "this image has no CUDA" in refusal(plan_of, f"{base}:2.13-cpu-amzn2023-sagemaker")


def test_remote_debugging_of_an_isolated_container_is_a_warning(plan_of: PlanOf) -> None:
    overrides = ("cluster.network.isolation=true", "cluster.remote_debug=true")
    warnings = plan_of(*overrides, text=SCRIPT_JOB).warnings
    assert any(
        "cluster.remote_debug: an isolated container cannot reach" in warning
        for warning in warnings
    )
