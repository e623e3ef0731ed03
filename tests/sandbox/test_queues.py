"""Runs that wait in AWS Batch's job queues, in the sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError
from support.jobs import Cli, command, until
from support.sandboxes import Served, request

import cloudtrain
from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sandbox.batch_queues import PATHS, QUEUE
from cloudtrain.planning.service_job import render_payload
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import Settings

pytestmark = [pytest.mark.processes, pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

JOB = """\
name: waits
code: {script: train.py, args: [PLACE]}
cluster: {instance_type: ml.m5.large, queue: cloudtrain-sandbox, processes_per_instance: 1}
limits: {runtime: 10m}
"""
SCRIPT = """
import os, pathlib, sys, time
print("ready", flush=True)
(pathlib.Path(os.environ["SM_MODEL_DIR"]) / "model.txt").write_text("weights")
while not (pathlib.Path(sys.argv[1]) / "go").exists():
    time.sleep(0.05)
print("done", flush=True)
"""
FOREVER = "echo ready; while true; do sleep 0.1; done"


def unknown_fields(response: Any, shape: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values in a response that are missing in its output shape, or that have another type."""
    if shape.type_name == "structure":
        yield from (
            f"{path}.{name} missing" for name in shape.required_members if name not in response
        )
        for name, value in response.items():
            if name in shape.members:
                yield from unknown_fields(value, shape.members[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif shape.type_name == "list":
        for item in response:
            yield from unknown_fields(item, shape.member, f"{path}[]")
    elif getattr(shape, "enum", None) and response not in shape.enum:
        yield f"{path}={response}"
    kinds = {
        "string": str,
        "integer": int,
        "long": int,
        "boolean": bool,
        "list": list,
        "map": dict,
        "structure": dict,
    }
    if not isinstance(response, kinds.get(shape.type_name, object)):
        yield path


@pytest.fixture
def batch(sandbox: Served) -> Iterator[Any]:
    """Yield a client of AWS Batch. After the test, terminate all jobs in the queues."""
    client = sandbox.client("batch")
    yield client
    for status in ("SUBMITTED", "RUNNABLE", "SCHEDULED", "STARTING", "RUNNING"):
        for job in client.list_service_jobs(jobQueue=QUEUE, jobStatus=status)["jobSummaryList"]:
            client.terminate_service_job(jobId=job["jobId"], reason="the test has ended")
    until(lambda: not client.list_service_jobs(jobQueue=QUEUE)["jobSummaryList"])


def submit(
    sandbox: Served, name: str, script: str = "true", queue: str = QUEUE, **fields: Any
) -> str:
    """Submit a shell script to a queue; return the id of the service job."""
    payload = request(sandbox, name, script, instances=fields.pop("instances", 1))
    document = {
        "jobName": name,
        "jobQueue": queue,
        "serviceJobType": "SAGEMAKER_TRAINING",
        **fields,
    }
    document.setdefault("serviceRequestPayload", json.dumps(payload))
    return str(sandbox.client("batch").submit_service_job(**document)["jobId"])


def backend_of(sandbox: Served) -> SageMakerBackend:
    """Return a backend with the account's settings and without local state, as on another machine."""
    import boto3

    class Session(boto3.Session):  # type: ignore[misc]
        def client(self, *arguments: Any, **options: Any) -> Any:
            return super().client(
                *arguments, **{**options, "endpoint_url": sandbox.info["endpoint"]}
            )

    keys = {
        name.lower(): value
        for name, value in sandbox.environment.items()
        if name.endswith("KEY_ID")
    }
    session = Session(**keys, aws_secret_access_key="sandbox", region_name="us-west-2")
    settings = Settings(
        role=sandbox.info["role"], bucket=sandbox.info["bucket"], region="us-west-2"
    )
    return SageMakerBackend(settings, session=session, poll_seconds=0.1)


_numbers = iter(range(0x100000, 0xFFFFFF))


def run_of(sandbox: Served, script: str) -> str:
    """Submit a shell script to a queue as a run of cloudtrain, with its plan in S3; return the run id."""
    run = f"shell-261120-101500-{next(_numbers):06x}"
    payload = request(sandbox, run, script, HyperParameters={"sagemaker_job_name": json.dumps(run)})
    plan = {"run": run, "queue": {"jobName": run, "jobQueue": QUEUE}, "request": payload}
    key = f"cloudtrain/{run}/plan.json"
    sandbox.client("s3").put_object(
        Bucket=sandbox.info["bucket"], Key=key, Body=json.dumps(plan).encode()
    )
    submit(sandbox, run, serviceRequestPayload=json.dumps(payload))
    return run


def state_is(backend: SageMakerBackend, run: str, *wanted: State) -> Callable[[], bool]:
    return lambda: backend.status(run).state in wanted


def test_paths_match_botocores_model() -> None:
    model = botocore.session.get_session().get_service_model("batch")
    for path, name in PATHS.items():
        assert model.operation_model(name).http["requestUri"] == path


def test_batch_responses_match_botocores_model(sandbox: Served, batch: Any) -> None:
    job = submit(sandbox, "form", "true", tags={"team": "vision"}, schedulingPriority=3)
    until(lambda: batch.describe_service_job(jobId=job)["status"] == "SUCCEEDED")
    waiting = submit(sandbox, "form-waits", instances=99)
    until(lambda: batch.describe_service_job(jobId=waiting).get("statusReason"))
    responses = {
        "DescribeServiceJob": batch.describe_service_job(jobId=job),
        "ListServiceJobs": batch.list_service_jobs(
            jobQueue=QUEUE, filters=[{"name": "JOB_NAME", "values": ["Form"]}]
        ),
        "DescribeJobQueues": batch.describe_job_queues(),
        "DescribeServiceEnvironments": batch.describe_service_environments(),
        "GetJobQueueSnapshot": batch.get_job_queue_snapshot(jobQueue=QUEUE),
    }
    model = botocore.session.get_session().get_service_model("batch")
    for name, response in responses.items():
        response.pop("ResponseMetadata")
        assert list(unknown_fields(response, model.operation_model(name).output_shape)) == [], name
    described = responses["DescribeServiceJob"]
    assert described["statusReason"] == "Received status from SageMaker: Training job completed"
    (attempt,) = described["attempts"]
    training_job = attempt["serviceResourceId"]["value"]
    assert training_job.startswith(
        "arn:aws:sagemaker:us-west-2:123456789012:training-job/AWSBatchform"
    )
    tags = sandbox.client("sagemaker").list_tags(ResourceArn=training_job)["Tags"]
    assert tags == [{"Key": "team", "Value": "vision"}]
    stuck = batch.describe_service_job(jobId=waiting)
    assert stuck["status"] == "RUNNABLE"
    assert stuck["statusReason"].startswith("MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"queue": "nope"}, "JobQueue nope not found."),
        ({"queue": "arn:aws:batch:us-west-2:123456789012:job-queue/nope"}, "not found."),
        ({"shareIdentifier": "a"}, "cloudtrain sandbox: the queue .* has no shares"),
        ({"quotaShareName": "a"}, "cloudtrain sandbox: the queue .* has no shares"),
        ({"retryStrategy": {"attempts": 2}}, "cloudtrain sandbox: .* one attempt"),
        ({"serviceRequestPayload": "no JSON"}, "not a JSON object"),
        ({"jobName": "a b"}, "Job name"),
    ],
)
def test_invalid_batch_requests_are_rejected(
    sandbox: Served, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClientError, match=message) as caught:
        submit(sandbox, "refused", **fields)
    assert caught.value.response["Error"]["Code"] == "ClientException"


def test_unsupported_batch_operations_are_rejected(sandbox: Served, batch: Any) -> None:
    for call in (
        lambda: batch.create_job_queue(jobQueueName="mine", priority=1, computeEnvironmentOrder=[]),
        lambda: batch.list_jobs(jobQueue=QUEUE),
        lambda: batch.describe_service_job(jobId="nope"),
    ):
        with pytest.raises(ClientError, match="ClientException"):
            call()
    sandbox.set_faults(throttle={"DescribeJobQueues": 1})
    with pytest.raises(ClientError, match="ThrottlingException"):
        batch.describe_job_queues()
    (queue,) = batch.describe_job_queues()["jobQueues"]
    assert queue["jobQueueName"] == QUEUE
    assert batch.describe_job_queues(jobQueues=["other"])["jobQueues"] == []


def test_a_payload_that_sagemaker_rejects_fails_in_the_queue(sandbox: Served, batch: Any) -> None:
    job = submit(sandbox, "invalid", serviceRequestPayload='{"TrainingJobName": "invalid"}')
    until(lambda: batch.describe_service_job(jobId=job)["status"] == "FAILED")
    reason = batch.describe_service_job(jobId=job)["statusReason"]
    assert reason.startswith("Received status from SageMaker: ValidationException: ")


def test_queue_is_first_in_first_out_even_for_large_jobs(sandbox: Served, batch: Any) -> None:
    sandbox.set_faults(queue_instances=2)
    blocker = submit(sandbox, "blocker", FOREVER)
    until(lambda: batch.describe_service_job(jobId=blocker)["status"] == "RUNNING")
    large = submit(sandbox, "large", instances=2, schedulingPriority=0)
    small = submit(sandbox, "small", schedulingPriority=9)  # this queue ignores priorities
    until(lambda: len(batch.get_job_queue_snapshot(jobQueue=QUEUE)["frontOfQueue"]["jobs"]) == 2)
    assert [status_of(batch, job) for job in (large, small)] == ["RUNNABLE", "RUNNABLE"]
    batch.terminate_service_job(jobId=blocker, reason="enough")
    until(lambda: {status_of(batch, job) for job in (large, small)} == {"SUCCEEDED"})
    begins = [batch.describe_service_job(jobId=job)["scheduledAt"] for job in (large, small)]
    assert begins == sorted(begins)
    ended = batch.describe_service_job(jobId=blocker)
    assert (ended["status"], ended["statusReason"], ended["isTerminated"]) == (
        "FAILED",
        "enough",
        True,
    )


def status_of(batch: Any, job: str) -> str:
    return str(batch.describe_service_job(jobId=job)["status"])


def test_the_second_of_two_jobs_waits_and_then_runs(
    sandbox: Served,
    batch: Any,
    job: Callable[..., Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Covers the path from job file to model with both transports, and the status in the queue."""
    sandbox.set_faults(queue_instances=1)
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    path = job(JOB.replace("PLACE", str(tmp_path)), train_py=SCRIPT)
    first = cli("submit", path, "--skip-check", "--detach", "--json").json
    until(lambda: cli("status", first["run"], "--json").json["state"] == "RUNNING")
    boto = {"CLOUDTRAIN_TRANSPORT": "boto3"}
    assert cli("submit", path, "--skip-check", "--json", environ=boto).json["run"] == first["run"]
    second = cli("submit", path, "--skip-check", "--new", "--json", environ=boto).json["run"]
    status = cli("status", second, "--json").json
    assert (status["state"], status["exit_code"]) == ("QUEUED", None)
    assert status["reason"] == "waits in the queue cloudtrain-sandbox"
    assert [phase["name"] for phase in status["phases"]] == ["Queued"]
    assert status["billable_seconds"] == 0
    assert cli("logs", second).out == ""
    listed = cli("list", "--sagemaker", "--json")
    runs = [(entry["run"], entry["state"]) for entry in listed.json["runs"]]
    assert runs[:2] == [(second, "QUEUED"), (first["run"], "RUNNING")]
    (tmp_path / "go").touch()
    done = until(
        lambda: (status := cli("status", second, "--json").json)["exit_code"] is not None and status
    )
    assert done["state"] == "SUCCEEDED"
    names = [phase["name"] for phase in done["phases"]]
    assert (names[0], names[-1]) == ("Queued", "Completed")
    assert done["phases"][0]["ended"]
    assert done["created"] == status["created"]
    uri = done["artifacts"]["model"]
    assert f"s3://{sandbox.info['bucket']}/cloudtrain/AWSBatchwaits-" in uri
    assert sandbox.keys(uri.removeprefix(f"s3://{sandbox.info['bucket']}/"))
    for run in (first["run"], second):
        lines = cli("logs", run, "--json").json["lines"]
        assert {line["host"] for line in lines} == {"algo-1"}
        assert [line["text"] for line in lines if line["text"] in ("ready", "done")] == [
            "ready",
            "done",
        ]
        assert by_name(payload_of(batch, run)) == by_name(planned(sandbox, run))


def payload_of(batch: Any, run: str) -> dict[str, Any]:
    """Return the payload of a run in AWS Batch."""
    filters = [{"name": "JOB_NAME", "values": [run]}]
    (summary,) = batch.list_service_jobs(jobQueue=QUEUE, filters=filters)["jobSummaryList"]
    payload: dict[str, Any] = json.loads(
        batch.describe_service_job(jobId=summary["jobId"])["serviceRequestPayload"]
    )
    return payload


def planned(sandbox: Served, run: str) -> dict[str, Any]:
    """Return the payload in the plan of a run."""
    s3 = sandbox.client("s3")
    body = s3.get_object(Bucket=sandbox.info["bucket"], Key=f"cloudtrain/{run}/plan.json")[
        "Body"
    ].read()
    return {name: value for name, value in json.loads(body)["request"].items() if name != "Tags"}


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with its channels by name, because their order does not matter."""
    return {
        **document,
        "InputDataConfig": {each["ChannelName"]: each for each in document["InputDataConfig"]},
    }


def test_stopped_while_it_waits(
    sandbox: Served, batch: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.set_faults(queue_instances=0)
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    run = run_of(sandbox, FOREVER)
    assert cli("status", run, "--json").json["state"] == "QUEUED"
    stopped = cli("stop", run)
    assert stopped.code == 0, stopped.err
    assert f"stopping sagemaker:{run}" in stopped.err
    assert f"sagemaker:{run} had ended already" in cli("stop", run).err
    status = cli("status", run, "--json").json
    assert (status["state"], status["exit_code"], status["reason"]) == (
        "STOPPED",
        5,
        "stopped by request",
    )
    log = cli("logs", run, "--follow")
    assert (log.out, log.err.strip()) == ("", "the log is empty")
    assert "no line of the log matches" in cli("logs", run, "--host", "algo-9").err
    sandbox.set_faults()
    until(
        lambda: not batch.list_service_jobs(jobQueue=QUEUE, jobStatus="RUNNABLE")["jobSummaryList"]
    )
    assert cli("status", run, "--json").json["state"] == "STOPPED"


def test_follow_of_a_run_stopped_in_the_queue_exits_with_5(
    sandbox: Served,
    batch: Any,
    job: Callable[..., Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    sandbox.set_faults(queue_instances=0)
    for name, value in {**sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}.items():
        monkeypatch.setenv(name, value)
    path = job(JOB.replace("PLACE", str(tmp_path)).replace("waits", "followed"), train_py=SCRIPT)
    words = [str(command()), "submit", str(path), "--skip-check", "--follow", "--json"]
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    filters = [{"name": "JOB_NAME", "values": ["followed-*"]}]
    (summary,) = until(
        lambda: batch.list_service_jobs(jobQueue=QUEUE, filters=filters)["jobSummaryList"]
    )
    assert cli("stop", summary["jobName"]).code == 0
    out, _ = follower.communicate(timeout=300)
    assert follower.returncode == 5
    assert json.loads(out)["state"] == "STOPPED"


def test_stopped_while_it_runs(sandbox: Served, batch: Any) -> None:
    run = run_of(sandbox, FOREVER)
    backend = backend_of(sandbox)
    until(state_is(backend, run, State.RUNNING))
    backend_of(sandbox).stop(run)
    until(state_is(backend, run, State.STOPPED))
    assert backend.status(run).reason == "stopped by request"
    backend.stop(run)  # stopping an ended run has no effect


def test_a_lost_response_creates_one_service_job(
    sandbox: Served,
    batch: Any,
    job: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    sandbox.set_faults(queue_instances=0, resets={"SubmitServiceJob": 1})
    for name, value in {**sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}.items():
        monkeypatch.setenv(name, value)
    run = cloudtrain.submit(
        job(JOB.replace("PLACE", str(tmp_path)), train_py=SCRIPT), skip_check=True
    )
    assert run.state is State.QUEUED
    found = batch.list_service_jobs(
        jobQueue=QUEUE, filters=[{"name": "JOB_NAME", "values": [run.id]}]
    )
    assert len(found["jobSummaryList"]) == 1
    described = batch.describe_service_job(jobId=found["jobSummaryList"][0]["jobId"])
    with pytest.raises(ClientError, match="client token"):
        batch.submit_service_job(
            jobName=run.id,
            jobQueue=QUEUE,
            serviceJobType="SAGEMAKER_TRAINING",
            serviceRequestPayload=described["serviceRequestPayload"],
            clientToken=run.id,
        )


def test_queued_job_waits_for_capacity(sandbox: Served, batch: Any) -> None:
    sandbox.set_faults(capacity_error_after_seconds=0)
    run = run_of(sandbox, "echo trained")
    backend = backend_of(sandbox)
    until(lambda: "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY" in backend.status(run).reason)
    for _ in range(20):  # meanwhile, training jobs are created and fail
        assert backend.status(run).state is State.QUEUED
        time.sleep(0.02)
    sandbox.set_faults()
    until(state_is(backend, run, State.SUCCEEDED))
    fresh = backend_of(sandbox)
    assert [line.text for line in fresh.logs(run)] == ["trained"]
    until(lambda: fresh.status(run).state is State.SUCCEEDED)


def test_failed_queued_run_reports_its_reason(sandbox: Served, batch: Any) -> None:
    run = run_of(sandbox, "echo broken; exit 3")
    backend = backend_of(sandbox)
    until(state_is(backend, run, State.FAILED))
    assert "exit code: 3" in backend.status(run).reason
    refused = f"shell-261120-101500-{next(_numbers):06x}"
    plan = {
        "run": refused,
        "queue": {"jobQueue": QUEUE},
        "request": request(sandbox, refused, "true"),
    }
    key = f"cloudtrain/{refused}/plan.json"
    sandbox.client("s3").put_object(
        Bucket=sandbox.info["bucket"], Key=key, Body=json.dumps(plan).encode()
    )
    submit(sandbox, refused, serviceRequestPayload=json.dumps({"TrainingJobName": refused}))
    until(state_is(backend, refused, State.FAILED))
    assert backend.status(refused).reason.startswith("ValidationException: ")


def test_run_stopped_outside_the_queue(sandbox: Served, batch: Any) -> None:
    run = run_of(sandbox, FOREVER)
    backend = backend_of(sandbox)
    until(state_is(backend, run, State.RUNNING))
    (name,) = (
        job for job in training_jobs(sandbox, "InProgress") if job.startswith(f"AWSBatch{run[:20]}")
    )
    sandbox.client("sagemaker").stop_training_job(TrainingJobName=name)
    until(state_is(backend, run, State.STOPPED))


def training_jobs(sandbox: Served, status: str) -> list[str]:
    pages = (
        sandbox.client("sagemaker")
        .get_paginator("list_training_jobs")
        .paginate(StatusEquals=status)
    )
    return [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]


def test_run_unknown_to_aws_batch_is_found_by_search(sandbox: Served, batch: Any) -> None:
    run = f"shell-261120-101500-{next(_numbers):06x}"
    payload = request(
        sandbox, run, "echo long ago", HyperParameters={"sagemaker_job_name": json.dumps(run)}
    )
    sandbox.client("sagemaker").create_training_job(
        **{**payload, "TrainingJobName": f"AWSBatchold{run[-6:]}"}
    )
    plan = {"run": run, "queue": {"jobQueue": QUEUE}, "request": payload}
    key = f"cloudtrain/{run}/plan.json"
    sandbox.client("s3").put_object(
        Bucket=sandbox.info["bucket"], Key=key, Body=json.dumps(plan).encode()
    )
    backend = backend_of(sandbox)
    until(state_is(backend, run, State.SUCCEEDED))
    assert [line.text for line in backend.logs(run)] == ["long ago"]
    backend.stop(run)


def test_jobs_that_are_no_queued_runs_are_not_found(sandbox: Served) -> None:
    with pytest.raises(cloudtrain.RunNotFoundError):
        backend_of(sandbox).status("shell-261120-101500-ffffff")


def test_the_sdks_queue_sends_the_same_request(
    sandbox: Served,
    batch: Any,
    job: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`sagemaker.aws_batch.TrainingQueue` sends the payload and tags of the plan. Other fields differ on purpose."""
    sandbox.set_faults(queue_instances=0)
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    # The SDK imports nest_asyncio for `result()`, and does not install it.
    monkeypatch.setitem(sys.modules, "nest_asyncio", types.ModuleType("nest_asyncio"))
    import boto3

    # `TrainingQueue` uses boto3's default session. An earlier test may have created it with other credentials.
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    from cloudtrain.backends.sagemaker.estimator import _estimator  # as in SageMakerBackend

    plan = cloudtrain.plan(job(JOB.replace("PLACE", str(tmp_path)), train_py=SCRIPT))
    session = boto3.Session()
    with _estimator(plan, session, session.client("sagemaker")) as (estimator, inputs):
        from sagemaker.aws_batch.training_queue import TrainingQueue

        queued = TrainingQueue(QUEUE).submit(
            estimator, inputs, job_name=plan.run, share_identifier=None
        )
        described = queued.describe()
    theirs, ours = (
        json.loads(described["serviceRequestPayload"]),
        json.loads(render_payload(plan.request)),
    )
    assert by_name(theirs) == by_name(ours)
    assert described["tags"] == (plan.queue or {})["tags"]
    assert described["jobName"] == (plan.queue or {})["jobName"]
    # Unlike cloudtrain, the SDK's queue ends every run after a day.
    assert described["timeoutConfig"] == {"attemptDurationSeconds": 86400}
    assert described["retryStrategy"]["attempts"] == 1
