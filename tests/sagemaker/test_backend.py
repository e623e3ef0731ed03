"""The SageMaker backend against moto over HTTP. All other sockets are denied."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from support.jobs import EXAMPLES, Cli

from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sagemaker.job_states import ACTIVE_STATES, FINAL_STATES, map_state
from cloudtrain.backends.sagemaker.log_streams import LOG_GROUP, LogStream, list_streams
from cloudtrain.runs.log_lines import LogFilter
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import format_event

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]


def enum(name: str) -> set[str]:
    return set(botocore.session.get_session().get_service_model("sagemaker").shape_for(name).enum)


def test_every_status_of_aws_is_mapped() -> None:
    assert set(ACTIVE_STATES) == enum("SecondaryStatus")
    assert set(FINAL_STATES) | {"InProgress", "Stopping"} == enum("TrainingJobStatus")


@pytest.mark.parametrize(
    ("status", "secondary", "state"),
    [
        ("InProgress", "Pending", State.QUEUED),
        ("InProgress", "Downloading", State.STARTING),
        ("InProgress", "Training", State.RUNNING),
        ("InProgress", "Interrupted", State.INTERRUPTED),
        ("InProgress", "SomethingNew", State.RUNNING),
        ("Stopping", "Stopping", State.STOPPING),
        ("Stopped", "MaxRuntimeExceeded", State.STOPPED),
        ("Stopped", "Interrupted", State.STOPPED),
        ("Completed", "Completed", State.SUCCEEDED),
        ("Failed", "Failed", State.FAILED),
    ],
)
def test_states(status: str, secondary: str, state: State) -> None:
    assert map_state(status, secondary) is state


@pytest.fixture
def submitted(cli: Cli, aws: dict[str, str]) -> str:
    done = cli("submit", EXAMPLES / "digits" / "job.yaml", "--instances", "2", "--json")
    assert done.code == 0, done.err
    assert done.json["backend"] == "sagemaker"
    assert done.json["world_size"] == 16
    return str(done.json["run"])


def client(service: str) -> Any:
    import boto3

    return boto3.client(service)


@pytest.mark.promise
def test_a_submit_uploads_once_and_creates_the_job(cli: Cli, submitted: str) -> None:
    job = client("sagemaker").describe_training_job(TrainingJobName=submitted)
    assert job["ResourceConfig"]["InstanceCount"] == 2
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in job["InputDataConfig"]
    }
    assert set(channels) == {"cloudtrain", "code"}
    s3 = client("s3")

    def read(uri: str) -> Any:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        return s3.get_object(Bucket=bucket, Key=key)

    code = read(channels["code"])
    run_json = json.loads(read(f"{channels['cloudtrain']}run.json")["Body"].read())
    assert run_json["run"] == submitted
    plan_json = json.loads(
        read(f"s3://cloudtrain-test/cloudtrain/{submitted}/plan.json")["Body"].read()
    )
    assert plan_json["request"]["TrainingJobName"] == submitted
    assert set(plan_json["source"]) == {"commit", "branch", "dirty", "diff"}
    assert (
        run_json["checkpoint"]["uri"] == f"s3://cloudtrain-test/cloudtrain/{submitted}/checkpoints"
    )

    time.sleep(1)  # S3 dates have whole seconds
    again = cli(
        "submit", EXAMPLES / "digits" / "job.yaml", "--set", "train.epochs=1", "--json"
    ).json["run"]
    assert again != submitted
    second = client("sagemaker").describe_training_job(TrainingJobName=again)["InputDataConfig"]
    assert channels["code"] in [c["DataSource"]["S3DataSource"]["S3Uri"] for c in second]
    assert read(channels["code"])["LastModified"] == code["LastModified"]


def test_status_list_and_stop(cli: Cli, submitted: str) -> None:
    status = cli("status", submitted, "--json")
    assert status.code == 0, status.err
    assert status.json["run"] == submitted
    assert status.json["state"] in set(State)
    assert cli("status", f"sagemaker:{submitted}").code == 0
    listed = cli("list", "--json").json["runs"]
    assert [run["run"] for run in listed] == [submitted]
    stopped = cli("stop", submitted, "--no-wait", "--json")
    assert stopped.code == 0, stopped.err


def test_a_name_without_a_record_is_asked_for(cli: Cli, submitted: str, tmp_path: Path) -> None:
    (tmp_path / "home" / ".config" / "cloudtrain" / "runs.jsonl").unlink()
    assert cli("status", "digits", "--json").json["run"] == submitted
    assert cli("status", submitted[-6:], "--json").json["run"] == submitted


def test_a_missing_run_is_reported(cli: Cli, aws: dict[str, str]) -> None:
    done = cli("status", "digits-261120-101500-1a2b3c")
    assert done.code == 2
    assert "SageMaker has no training job" in done.err


@pytest.fixture
def logged(submitted: str) -> str:
    """Write log lines of two hosts; return the run."""
    logs = client("logs")
    logs.create_log_group(logGroupName=LOG_GROUP)
    lines = {
        "algo-1": [
            "starting",
            format_event("started", {"step": 0, "world_size": 16, "device": "cuda"}),
            format_event("step", {"step": 10, "epoch": 0, "loss": 0.5, "samples_per_second": 9.0}),
            format_event(
                "checkpoint", {"step": 10, "uri": "s3://c/step-00000010", "time": time.time()}
            ),
        ],
        "algo-2": ["hello from the second host"],
    }
    now = int(time.time() * 1000)
    for host, messages in lines.items():
        stream = f"{submitted}/{host}-{now}"
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
        logs.put_log_events(
            logGroupName=LOG_GROUP,
            logStreamName=stream,
            logEvents=[
                {"timestamp": now + i, "message": message} for i, message in enumerate(messages)
            ],
        )
    return submitted


def test_logs_come_from_cloudwatch_each_line_once(cli: Cli, logged: str) -> None:
    done = cli("logs", logged)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 5
    assert lines[0] == "algo-1  starting"
    assert lines[1] == "algo-2  hello from the second host"  # at the same millisecond
    assert lines[-1] == "algo-1  checkpoint of step 10"
    assert cli("logs", logged, "--host", "algo-2").out == "algo-2  hello from the second host\n"


def test_followed_logs_repeat_nothing(logged: str) -> None:
    """test_logs.py proves more with our own server. This test shows the same behaviour with moto."""
    stream = LogStream(list_streams(client("logs"), (logged,)).names[0])
    assert len(stream.read_page(client("logs"))) == 4
    assert stream.read_page(client("logs")) == []
    assert stream.is_at_end
    client("logs").put_log_events(
        logGroupName=LOG_GROUP,
        logStreamName=stream.name,
        logEvents=[{"timestamp": int(time.time() * 1000) + 1000, "message": "later"}],
    )
    assert [event["message"] for event in stream.read_page(client("logs"))] == ["later"]


@pytest.mark.promise
def test_a_run_is_followed_to_its_end(logged: str) -> None:
    backend = SageMakerBackend(Settings(region="us-west-2"), poll_seconds=0.05)
    lines = list(backend.logs(logged, follow=True, only=LogFilter(host="algo-1")))
    assert [line.text.split()[0] for line in lines] == [
        "starting",
        "CLOUDTRAIN",
        "CLOUDTRAIN",
        "CLOUDTRAIN",
    ]


def test_status_reads_progress_from_the_log(cli: Cli, logged: str) -> None:
    content = cli("status", logged, "--json").json
    assert content["last_step"] == 10
    assert (
        content["metrics"].items() >= {"train/loss": 0.5, "train/samples_per_second": 9.0}.items()
    )
    assert content["last_checkpoint"]["uri"] == "s3://c/step-00000010"
    assert content["last_checkpoint"]["age_seconds"] < 300


@pytest.mark.promise
def test_an_error_of_aws_is_exit_code_3(cli: Cli, aws: dict[str, str]) -> None:
    job = EXAMPLES / "digits" / "job.yaml"
    done = cli("submit", job, "--skip-check", environ={"CLOUDTRAIN_BUCKET": "not-there"})
    assert done.code == 3
    assert "NoSuchBucket" in done.err
    assert "Traceback" not in done.err
    assert client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []


def test_an_unreachable_aws_is_exit_code_3(cli: Cli, aws: dict[str, str]) -> None:
    environ = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    done = cli("submit", EXAMPLES / "digits" / "job.yaml", environ=environ)
    assert done.code == 3
    assert "could not" in done.err
    assert "Traceback" not in done.err


def test_world_size_comes_from_the_plan_before_any_event(cli: Cli, aws: dict[str, str]) -> None:
    shape = ("--instances", "2", "--set", "cluster.processes_per_instance=1")
    done = cli(
        "submit",
        EXAMPLES / "digits" / "job.yaml",
        *shape,
        "--json",
        environ={"CLOUDTRAIN_TRANSPORT": "boto3"},
    )
    assert done.json["world_size"] == 2
    run = done.json["run"]
    assert cli("status", run, "--json").json["world_size"] == 2
    client("s3").delete_object(Bucket="cloudtrain-test", Key=f"cloudtrain/{run}/plan.json")
    assert cli("status", run, "--json").json["world_size"] is None


def test_local_data_is_uploaded_to_the_bucket(
    cli: Cli, aws: dict[str, str], job: Callable[..., Path]
) -> None:
    path = job(
        "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge}\ndata: {train: numbers}\n",
        train_py="",
    )
    (path.parent / "numbers" / "deep").mkdir(parents=True)
    (path.parent / "numbers" / "deep" / "one.txt").write_text("1")
    run = cli("submit", path, "--json").json["run"]
    found = client("s3").get_object(
        Bucket="cloudtrain-test", Key=f"cloudtrain/{run}/data/train/deep/one.txt"
    )
    assert found["Body"].read() == b"1"


def test_the_network_guard_works() -> None:
    """Without the guard, no test would prove that the product makes no other connections."""
    import socket

    with pytest.raises(PermissionError, match="tests may not"):
        socket.create_connection(("169.254.169.254", 80), timeout=1)
    with pytest.raises(PermissionError, match="tests may not"):
        socket.getaddrinfo("sts.amazonaws.com", 443)
