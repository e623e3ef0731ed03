"""AWS Batch service jobs described as training jobs, and the document that an estimator renders for a queue."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from support.aws_frontend import Answer, Front
from support.estimator import boto_session, settings_checked_once

from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sagemaker.batch_queue import (
    ENDED,
    STOP_REASON,
    TRAINING_JOB_STATUSES,
    WAITING,
    as_training_job,
    attempt_names,
)
from cloudtrain.backends.sagemaker.estimator import compare, render_by_estimator
from cloudtrain.backends.sagemaker.job_states import map_state, read_reason
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.errors import CloudError, DriftError, RunNotFoundError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import Settings

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

RUN = "demo-261120-101500-1a2b3c"
BEGAN = datetime(2026, 11, 20, 10, 15, tzinfo=UTC)
MILLISECONDS = int(BEGAN.timestamp() * 1000)
SERVICE = {
    "jobId": "1",
    "jobArn": "arn:aws:batch:us-west-2:123456789012:service-job/1",
    "jobName": RUN,
    "jobQueue": "arn:aws:batch:us-west-2:123456789012:job-queue/ml",
    "createdAt": MILLISECONDS,
    "startedAt": 0,
}
REQUEST = {
    "TrainingJobName": RUN,
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1},
}
JOB = """\
name: demo
code: {task: "mine:Mine"}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, queue: {name: ml, priority: 0, share: research}}
train: {steps: 10}
tags: {team: vision}
"""


def training(status: str, secondary: str, **fields: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": "AWSBatchx",
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        **fields,
    }


def described(
    status: str, job: Mapping[str, Any] | None = None, position: int | None = None, **fields: Any
) -> Mapping[str, Any]:
    return as_training_job(RUN, REQUEST, {**SERVICE, "status": status, **fields}, job, position)


def state_of(job: Mapping[str, Any]) -> State:
    return map_state(job["TrainingJobStatus"], job["SecondaryStatus"])


def test_every_status_of_aws_batch_is_mapped() -> None:
    enum = set(
        botocore.session.get_session().get_service_model("batch").shape_for("ServiceJobStatus").enum
    )
    assert set(TRAINING_JOB_STATUSES) == enum
    assert set(WAITING) | set(ENDED) < enum
    model = botocore.session.get_session().get_service_model("sagemaker")
    for status, secondary in TRAINING_JOB_STATUSES.values():
        assert status in model.shape_for("TrainingJobStatus").enum
        assert secondary in model.shape_for("SecondaryStatus").enum


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("SUBMITTED", State.QUEUED),
        ("PENDING", State.QUEUED),
        ("RUNNABLE", State.QUEUED),
        ("SCHEDULED", State.QUEUED),
        ("STARTING", State.STARTING),
        ("RUNNING", State.RUNNING),
        ("SUCCEEDED", State.SUCCEEDED),
        ("FAILED", State.FAILED),
        ("SOMETHING_NEW", State.QUEUED),
    ],
)
def test_states_without_a_training_job(status: str, state: State) -> None:
    job = described(status)
    assert state_of(job) is state
    assert job["TrainingJobName"] == RUN
    assert job["ResourceConfig"] == REQUEST["ResourceConfig"]
    assert job["CreationTime"] == BEGAN


def test_why_a_run_waits() -> None:
    assert read_reason(described("RUNNABLE"), datetime.now(UTC)) == "waits in the queue ml"
    assert (
        read_reason(described("RUNNABLE", position=0), datetime.now(UTC)) == "waits in the queue ml"
    )
    assert (
        read_reason(described("RUNNABLE", position=1), datetime.now(UTC))
        == "waits in the queue ml, 1 job before it"
    )
    capacity = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - none"
    assert read_reason(
        described("RUNNABLE", position=2, statusReason=capacity), datetime.now(UTC)
    ) == (f"waits in the queue ml, 2 jobs before it: {capacity}")


@pytest.mark.parametrize(
    ("fields", "state", "reason"),
    [
        ({"isTerminated": True, "statusReason": STOP_REASON}, State.STOPPED, "stopped by request"),
        ({"isTerminated": True, "statusReason": "made room"}, State.STOPPED, "made room"),
        (
            {"statusReason": "Terminated by JobStateTimeLimit action due to reason: CAPACITY:X"},
            State.STOPPED,
            "Terminated by JobStateTimeLimit action due to reason: CAPACITY:X",
        ),
        (
            {"statusReason": "Received status from SageMaker: ValidationException: no"},
            State.FAILED,
            "ValidationException: no",
        ),
        ({}, State.FAILED, "waited in the queue ml"),
    ],
)
def test_ends_before_a_training_job(fields: dict[str, Any], state: State, reason: str) -> None:
    job = described("FAILED", stoppedAt=MILLISECONDS + 5000, **fields)
    assert state_of(job) is state
    assert read_reason(job, datetime.now(UTC)) == reason
    assert (job["TrainingEndTime"] - BEGAN).total_seconds() == 5


def test_a_training_jobs_status_precedes_the_service_jobs() -> None:
    transition = {"Status": "Starting", "StartTime": BEGAN, "StatusMessage": "Starting"}
    job = described(
        "SCHEDULED",
        training("InProgress", "Training", SecondaryStatusTransitions=[transition]),
        scheduledAt=MILLISECONDS + 1000,
    )
    assert state_of(job) is State.RUNNING
    assert job["TrainingJobName"] == "AWSBatchx"
    queued, starting = job["SecondaryStatusTransitions"]
    assert (queued["Status"], queued["StatusMessage"]) == ("Queued", "waited in the queue ml")
    assert (queued["EndTime"] - queued["StartTime"]).total_seconds() == 1
    assert starting == transition


@pytest.mark.parametrize(
    ("status", "job", "fields", "state"),
    [
        # AWS Batch may retry, so the run has not ended.
        (
            "STARTING",
            training("Failed", "Failed", FailureReason="CapacityError: none"),
            {},
            State.QUEUED,
        ),
        ("RUNNING", training("Stopped", "Stopped"), {}, State.QUEUED),
        ("RUNNING", training("Completed", "Completed"), {}, State.SUCCEEDED),
        ("RUNNING", training("Stopping", "Stopping"), {}, State.STOPPING),
        (
            "FAILED",
            training("Failed", "Failed", FailureReason="AlgorithmError: x"),
            {},
            State.FAILED,
        ),
        ("FAILED", training("Stopped", "Stopped"), {}, State.STOPPED),
        ("FAILED", training("Stopped", "MaxRuntimeExceeded"), {}, State.STOPPED),
        # Stopped while it waited for capacity, after an attempt without capacity.
        (
            "FAILED",
            training("Failed", "Failed", FailureReason="CapacityError: none"),
            {"isTerminated": True, "statusReason": STOP_REASON},
            State.STOPPED,
        ),
        (
            "FAILED",
            training("Failed", "Failed", FailureReason="AlgorithmError: x"),
            {"isTerminated": True, "statusReason": STOP_REASON},
            State.FAILED,
        ),
    ],
)
def test_states_if_training_job_and_service_job_differ(
    status: str, job: dict[str, Any], fields: dict[str, Any], state: State
) -> None:
    assert state_of(described(status, job, **fields)) is state


def test_attempts_in_their_order() -> None:
    def attempt(name: str) -> dict[str, Any]:
        arn = f"arn:aws:sagemaker:us-west-2:123456789012:training-job/{name}"
        return {"serviceResourceId": {"name": "TrainingJobArn", "value": arn}}

    attempts = [attempt("AWSBatcha"), {}, attempt("AWSBatchb")]
    assert attempt_names({"attempts": attempts, "latestAttempt": attempt("AWSBatchb")}) == (
        "AWSBatcha",
        "AWSBatchb",
    )
    assert attempt_names({"latestAttempt": attempt("AWSBatchc")}) == ("AWSBatchc",)
    assert attempt_names({}) == ()


@pytest.fixture
def plan(job: Callable[..., Path]) -> Plan:
    path = job(JOB, mine_py="class Mine(Task):\n    def __init__(self): ...\n")
    account = Settings(
        role="arn:aws:iam::123456789012:role/training", bucket="cloudtrain-test", region="us-west-2"
    )
    target = SageMakerTarget(account, bundled_prices())
    return make_plan(
        JobSpec.from_yaml(path), CodeInfo("d" * 64, 1000, 3), target, now=BEGAN, suffix="1a2b3c"
    )


def test_estimator_renders_queue_document_and_sends_nothing(
    aws: dict[str, str], plan: Plan
) -> None:
    session = boto_session()
    client = session.client("sagemaker")
    with settings_checked_once():
        document = render_by_estimator(plan, session, client)
    assert list(compare(plan.request, document)) == []
    assert client.list_training_jobs()["TrainingJobSummaries"] == []


def test_a_document_that_differs_is_never_sent(aws: dict[str, str], plan: Plan) -> None:
    request = copy.deepcopy(plan.request)
    request["StoppingCondition"]["MaxRuntimeInSeconds"] += 1
    request["RetryStrategy"] = {"MaximumRetryAttempts": 2}
    del request["ProfilerConfig"]
    session = boto_session()
    with (
        settings_checked_once(),
        pytest.raises(DriftError, match="ProfilerConfig: not planned") as caught,
    ):
        render_by_estimator(replace(plan, request=request), session, session.client("sagemaker"))
    assert "StoppingCondition" not in str(caught.value)  # the estimator takes it from the request


@pytest.fixture
def front(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        yield served


def test_a_run_without_a_queue_does_not_call_aws_batch(front: Front) -> None:
    backend = SageMakerBackend(Settings(bucket="cloudtrain-test", region="us-west-2"))
    with pytest.raises(RunNotFoundError):
        backend.status(RUN)
    assert list(backend.list()) == []
    assert not any("/v1/" in name for name in front.seen)


def test_without_a_bucket_no_queue_is_searched(front: Front) -> None:
    backend = SageMakerBackend(Settings(region="us-west-2"))
    with pytest.raises(RunNotFoundError):
        backend.status(RUN)
    assert list(backend.list()) == []
    assert set(front.seen) == {"DescribeTrainingJob", "ListTrainingJobs"}


def test_the_folder_that_a_console_makes_is_no_queue(front: Front) -> None:
    import boto3

    boto3.client("s3").put_object(Bucket="cloudtrain-test", Key="cloudtrain/queues/", Body=b"")
    backend = SageMakerBackend(Settings(bucket="cloudtrain-test", region="us-west-2"))
    assert list(backend.list()) == []
    assert not any("/v1/" in name for name in front.seen)


def put_plan(text: str) -> None:
    """Store content as the plan of a run."""
    import boto3

    boto3.client("s3").put_object(
        Bucket="cloudtrain-test", Key=f"cloudtrain/{RUN}/plan.json", Body=text.encode()
    )


def test_a_denied_call_of_aws_batch_is_reported(front: Front, plan: Plan) -> None:
    backend = SageMakerBackend(Settings(bucket="cloudtrain-test", region="us-west-2"))
    put_plan(plan.to_file())
    front.rules["POST /v1/listservicejobs"] = lambda _request: Answer.denied()
    with pytest.raises(
        CloudError, match="could not read the queue ml: AWS says AccessDeniedException"
    ):
        backend.status(RUN)


def test_other_runs_are_listed_if_queues_cannot_be_read(front: Front) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    front.rules["GET /cloudtrain-test"] = lambda _request: Answer(
        denied, 403, {"Content-Type": "text/xml"}
    )
    assert (
        list(SageMakerBackend(Settings(bucket="cloudtrain-test", region="us-west-2")).list()) == []
    )
    assert "GET /cloudtrain-test" in front.seen


def test_a_malformed_plan_has_no_queue(front: Front) -> None:
    backend = SageMakerBackend(Settings(bucket="cloudtrain-test", region="us-west-2"))
    for text in ("", "[]", "{}", '{"queue": 3, "request": {}}', '{"queue": null}'):
        put_plan(text)
        with pytest.raises(RunNotFoundError):
            backend.status(RUN)
