"""`cluster.queue`: its forms in a job, and the SubmitServiceJob document of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator

from cloudtrain.aws.errors import aws_errors
from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.console.plans import print_plan
from cloudtrain.errors import CloudError, SpecError
from cloudtrain.job.sections.cluster import Cluster, Queue
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.service_job import render_payload, training_job_name
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Settings

RUN = "demo-261120-101500-1a2b3c"
SETTINGS = Settings(
    role="arn:aws:iam::123456789012:role/training", bucket="bucket", region="us-west-2"
)
JOB = """\
name: demo
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
tags: {team: vision}
"""
ARN = "arn:aws:batch:us-west-2:123456789012:job-queue/ml_training-1"
EVERYTHING = f"cluster.queue={{name: {ARN}, priority: 0, share: research}}"
REQUIRED = {
    "jobName": "j",
    "jobQueue": "q",
    "serviceJobType": "SAGEMAKER_TRAINING",
    "serviceRequestPayload": "{}",
}
QUOTA = "cluster.queue={name: ml-training, priority: 9, quota_share: vision_2, preempt: 0}"

PlanOf = Callable[..., Plan]


@pytest.fixture
def plan_of(job: Callable[..., Path]) -> PlanOf:
    def plan(*overrides: str, target: Target = SageMakerTarget(SETTINGS, bundled_prices())) -> Plan:  # noqa: B008
        spec = JobSpec.from_yaml(job(JOB, train_py=""), overrides)
        code = CodeInfo("d" * 64, 1000, 3)
        return make_plan(
            spec, code, target, now=datetime(2026, 11, 20, 10, 15, tzinfo=UTC), suffix="1a2b3c"
        )

    return plan


def refusal(plan_of: PlanOf, *overrides: str, **arguments: Any) -> str:
    with pytest.raises(SpecError) as caught:
        plan_of(*overrides, **arguments)
    return str(caught.value)


def test_without_a_queue_there_is_no_document(plan_of: PlanOf) -> None:
    plan = plan_of()
    assert plan.queue is None
    assert plan.to_json()["queue"] is None


def test_the_document_of_a_name_and_of_everything(plan_of: PlanOf) -> None:
    short, everything = plan_of("cluster.queue=ml-training"), plan_of(EVERYTHING)
    assert short.identity != everything.identity  # with another priority it is another submit
    document = {
        "jobName": RUN,
        "jobQueue": "ml-training",
        "serviceJobType": "SAGEMAKER_TRAINING",
        "retryStrategy": {"attempts": 1},
        "clientToken": RUN,
        "tags": {"cloudtrain:job": "demo", "team": "vision", "cloudtrain:request": short.identity},
    }
    assert short.to_json()["queue"] == document
    # A priority of 0 is sent. The SageMaker SDK would drop it.
    assert everything.queue == {
        **document,
        "tags": {**document["tags"], "cloudtrain:request": everything.identity},
        "jobQueue": ARN,
        "schedulingPriority": 0,
        "shareIdentifier": "research",
    }


def test_the_document_of_a_quota_share(plan_of: PlanOf) -> None:
    queue = plan_of(QUOTA).queue or {}
    assert (queue["quotaShareName"], queue["schedulingPriority"]) == ("vision_2", 9)
    assert queue["preemptionConfiguration"] == {"preemptionRetriesBeforeTermination": 0}
    assert "shareIdentifier" not in queue
    unlimited = plan_of("cluster.queue={name: q, quota_share: vision}").queue or {}
    assert "preemptionConfiguration" not in unlimited  # AWS Batch then preempts a job without limit


def test_an_old_boto3_is_named_as_the_cause() -> None:
    import boto3

    session = boto3.Session("key", "secret", region_name="us-west-2")
    with pytest.raises(CloudError) as caught, aws_errors("submit to the queue q"):
        session.client("batch").submit_service_job(**REQUIRED, ofAVersionToCome=1)
    assert "ofAVersionToCome" in caught.value.message
    assert "this boto3 is too old" in caught.value.hint


@pytest.mark.parametrize("override", ["cluster.queue=ml-training", EVERYTHING, QUOTA])
def test_the_model_of_aws_accepts_the_document(plan_of: PlanOf, override: str) -> None:
    plan = plan_of(override)
    shape = get_session().get_service_model("batch").operation_model("SubmitServiceJob").input_shape
    document = {**(plan.queue or {}), "serviceRequestPayload": render_payload(plan.request)}
    assert not ParamValidator().validate(document, shape).has_errors()
    assert set(document) <= set(shape.members)
    token = shape.members["clientToken"]
    assert (
        token.metadata["min"] <= len(RUN) <= 63 <= token.metadata["max"]
    )  # the longest run id is a valid token


def test_the_payload_is_the_request_of_a_run_without_a_queue(plan_of: PlanOf) -> None:
    with_queue, without = plan_of(EVERYTHING), plan_of()
    payload = json.loads(render_payload(with_queue.request))
    assert payload == {name: value for name, value in without.request.items() if name != "Tags"}
    assert {tag["Key"]: tag["Value"] for tag in with_queue.request["Tags"]} == (
        with_queue.queue or {}
    )["tags"]


def test_the_constructor_accepts_the_short_form() -> None:
    short = Cluster(instance_type="ml.p5.48xlarge", queue="ml-training")  # type: ignore[arg-type]
    assert short == Cluster(instance_type="ml.p5.48xlarge", queue=Queue(name="ml-training"))


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        ('"two words"', 'cluster.queue: expected the name or ARN of a job queue, got "two words"'),
        ('""', 'cluster.queue: expected the name or ARN of a job queue, got ""'),
        ("arn:aws:sqs:us-west-2:123456789012:q", "expected the name or ARN of a job queue"),
        ("3", "cluster.queue"),
        ("{priority: 1}", "cluster.queue.name: required"),
        ("{name: q, priority: 10000}", "cluster.queue.priority: expected at most 9999, got 10000"),
        ("{name: q, priority: -1}", "cluster.queue.priority: expected at least 0, got -1"),
        ("{name: q, priority: true}", "cluster.queue.priority: expected a number, got true"),
        (
            "{name: q, share: a-b}",
            'cluster.queue.share: expected 1 to 255 letters and digits, got "a-b"',
        ),
        (
            "{name: q, quota_share: a b}",
            "cluster.queue.quota_share: expected 1 to 128 letters, digits, hyphens and",
        ),
        (
            "{name: q, quota_share: a, share: b}",
            "a queue has fair shares or quota shares: give share or quota_share",
        ),
        (
            "{name: q, preempt: 1}",
            "cluster.queue.preempt: only jobs of a quota share are preempted; give quota_share",
        ),
        (
            "{name: q, quota_share: a, preempt: -1}",
            "cluster.queue.preempt: expected at least 0, got -1",
        ),
        ("{name: q, shares: a}", 'cluster.queue.shares: unknown field; did you mean "share"?'),
    ],
)
def test_an_invalid_queue_is_refused_with_its_place(
    job: Callable[..., Path], queue: str, message: str
) -> None:
    path = job(JOB.replace("instances: 2", f"instances: 2, queue: {queue}"), train_py="")
    with pytest.raises(SpecError) as caught:
        JobSpec.from_yaml(path)
    assert message in str(caught.value)
    assert "job.yaml:3:" in str(caught.value)


def test_a_queue_of_another_region(plan_of: PlanOf) -> None:
    other = ARN.replace("us-west-2", "eu-west-1")
    message = refusal(plan_of, f"cluster.queue={other}")
    assert (
        "cluster.queue: the queue is in eu-west-1, but the job is in us-west-2; use a queue of us-west-2"
        in message
    )
    nowhere = Settings(role=SETTINGS.role, bucket="bucket")
    assert plan_of(
        f"cluster.queue={other}", target=SageMakerTarget(nowhere, bundled_prices())
    ).queue  # no region is set yet


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.queue={name: q, priority: 5}"],
            "cluster.queue.priority is ignored without a share",
        ),
        (
            ["cluster.queue=q", "cluster.max_pending=6h"],
            "cluster.max_pending ends one attempt only",
        ),
        (
            [
                "cluster.queue=q",
                "cluster.instance_type=null",
                "cluster.prefer=[ml.p4d.24xlarge, ml.p4de.24xlarge]",
            ],
            "cluster.prefer: AWS Batch does not document how it counts",
        ),
    ],
)
def test_fields_with_another_effect_in_a_queue_are_warnings(
    plan_of: PlanOf, overrides: list[str], message: str
) -> None:
    assert any(message in warning for warning in plan_of(*overrides).warnings)
    for shares in ("share", "quota_share"):
        plan = plan_of(f"cluster.queue={{name: q, {shares}: a, priority: 5}}")
        assert not any("queue" in warning for warning in plan.warnings)


def test_a_local_run_ignores_the_queue(plan_of: PlanOf) -> None:
    here = LocalTarget(SETTINGS, Path("/somewhere/.cloudtrain"), Machine(gpus=0))
    plan = plan_of(EVERYTHING, target=here)
    assert plan.queue is None
    assert "cluster.queue is ignored: a local run has no queue" in plan.warnings


def test_a_plan_shows_its_queue(plan_of: PlanOf, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan_of(EVERYTHING))
    shown = capsys.readouterr().out
    assert f"{ARN}, priority 0, share research" in shown
    print_plan(plan_of(QUOTA))
    shown = capsys.readouterr().out
    assert "ml-training, priority 9, quota share vision_2, continues after 0 preemptions" in shown
    print_plan(plan_of())
    assert "queue" not in capsys.readouterr().out


def test_names_by_aws_batch_are_valid_in_sagemaker() -> None:
    # The example in AWS's documentation: AWSBatchmy-training-job88b610a69aa8380ca5b0a7aba3f81cb8.
    attempt = "88b610a69aa8380ca5b0a7aba3f81cb8"
    assert training_job_name("my-training-job", attempt) == f"AWSBatchmy-training-job{attempt}"
    assert len(training_job_name("x" * 63, attempt)) == 63
