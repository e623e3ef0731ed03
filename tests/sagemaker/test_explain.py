"""`explain` for runs on SageMaker: status, log and run.json over HTTP.

moto's jobs never fail, so a server in front of moto reports the failures.
"""

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from support.aws_frontend import Answer, Front, Request
from support.jobs import EXAMPLES, Cli

import cloudtrain
from cloudtrain.backends.sagemaker.log_streams import LOG_GROUP

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

BEGAN = 1_795_247_000_000
"""Milliseconds since the epoch."""


@pytest.fixture
def front(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        yield front


@pytest.fixture
def run(front: Front, cli: Cli) -> str:
    overrides = ("--instances", "2", "--set", "train.batch_size=48", "--skip-check")
    done = cli(
        "submit",
        EXAMPLES / "digits" / "job.yaml",
        *overrides,
        "--json",
        environ={"CLOUDTRAIN_TRANSPORT": "boto3"},
    )
    assert done.code == 0, done.err
    return str(done.json["run"])


def fail(front: Front, aws: dict[str, str], run: str, reason: str) -> None:
    """Make DescribeTrainingJob report a failed job; moto answers all other operations."""
    job: dict[str, Any] = boto3.client(
        "sagemaker", endpoint_url=aws["AWS_ENDPOINT_URL"]
    ).describe_training_job(TrainingJobName=run)
    job.pop("ResponseMetadata")
    failed = {
        **job,
        "TrainingJobStatus": "Failed",
        "SecondaryStatus": "Failed",
        "FailureReason": reason,
    }
    content = json.loads(json.dumps(failed, default=lambda moment: moment.timestamp()))

    def answer(request: Request) -> Answer:
        assert json.loads(request.body) == {"TrainingJobName": run}
        return Answer.json(content)

    front.rules["DescribeTrainingJob"] = answer


def log(run: str, host: str, *lines: tuple[int, str]) -> None:
    logs = boto3.client("logs")
    stream = f"{run}/{host}-{BEGAN}"
    logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
    events = [{"timestamp": BEGAN + at, "message": text} for at, text in lines]
    logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)


def test_the_earliest_failure_of_two_hosts_is_the_cause(
    cli: Cli, front: Front, aws: dict[str, str], run: str
) -> None:
    fail(front, aws, run, "AlgorithmError: rank 0 on algo-1 (local rank 0) failed: ...")
    boto3.client("logs").create_log_group(logGroupName=LOG_GROUP)
    log(
        run,
        "algo-1",
        (0, "[rank0]: Traceback (most recent call last):"),
        (1, '[rank0]:   File "/opt/ml/code/digits.py", line 9, in loss'),
        (900, "[rank0]: IndexError: list index out of range"),
    )
    log(
        run,
        "algo-2",
        (100, "[rank9]: Traceback (most recent call last):"),
        (101, '[rank9]:   File "/opt/ml/code/digits.py", line 7, in loss'),
        (
            102,
            "[rank9]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total",
        ),
    )
    done = cli("explain", run, "--json")
    assert done.code == 0, done.err
    assert (done.json["class"], done.json["host"], done.json["rank"]) == (
        "out_of_memory",
        "algo-2",
        9,
    )
    assert "train.batch_size (now 48)" in done.json["action"]
    shown = cli("explain", run).out
    assert "cause      out of GPU memory\nwhere      rank 9, algo-2\n" in shown
    assert f"logs sagemaker:{run}" in shown


def test_sagemakers_own_reason_needs_no_log(
    cli: Cli, front: Front, aws: dict[str, str], run: str
) -> None:
    fail(front, aws, run, "CapacityError: Unable to provision requested ML compute capacity.")
    done = cli("explain", run, "--json")
    assert (done.code, done.json["class"]) == (0, "capacity")
    assert "(now ml." in done.json["action"]


def test_an_unreadable_config_only_removes_values(
    cli: Cli, front: Front, aws: dict[str, str], run: str
) -> None:
    fail(
        front, aws, run, "ClientError: Data download failed:S3 key: s3://b/k matched no files on s3"
    )
    described = boto3.client("sagemaker").describe_training_job(TrainingJobName=run)
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in described["InputDataConfig"]
    }
    bucket, _, key = channels["cloudtrain"].removeprefix("s3://").partition("/")
    boto3.client("s3").delete_object(Bucket=bucket, Key=f"{key.removesuffix('/')}/run.json")
    facts = cloudtrain.get_run(run).facts()
    assert (facts["role"], facts["cluster.instances"], facts.get("train.batch_size")) == (
        "training",
        "2",
        None,
    )
    assert cli("explain", run, "--json").json["class"] == "data"
