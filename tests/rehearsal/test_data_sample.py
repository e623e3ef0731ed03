"""Samples of data in S3: read from moto and from a server that refuses, over loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.s3_faults import FaultPlan
from support.s3_server import S3Server

from cloudtrain.errors import CloudError, UserError
from cloudtrain.features.rehearsal.data_sample import Sample, parse_sample, sample_channels
from cloudtrain.job.spec import JobSpec, load_job
from cloudtrain.support.checks import Check, Result

JOB = """\
name: demo
code: {script: train.py}
cluster: {instance_type: ml.g5.xlarge, instances: 2}
data:
  train: {uri: "s3://cloudtrain-test/data", mode: FastFile, sharded: true}
  labels: labels
"""


@pytest.fixture
def s3(aws: dict[str, str]) -> Any:
    import boto3

    return boto3.client("s3")


@pytest.fixture
def server(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    found = S3Server(None, FaultPlan())
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
    yield found
    found.kill()


Change = Callable[..., tuple[JobSpec, list[Check]]]


@pytest.fixture
def change(job: Callable[..., Path], tmp_path: Path) -> Change:
    """Return a function that replaces the data of `JOB`, in a new folder for each call."""
    spec = load_job(job(JOB, train_py="")).spec
    folders = iter(range(10))

    def run(sample: Sample) -> tuple[JobSpec, list[Check]]:
        folder = tmp_path / f"rehearsal-{next(folders)}"
        changed, checks = sample_channels(spec, sample, folder, time.monotonic() + 100)
        return changed, list(checks)

    return run


def content(spec: JobSpec) -> dict[str, str]:
    folder = Path(spec.data["train"].uri or "")
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def put(s3: Any, count: int, size: int = 10) -> None:
    for index in range(count):
        s3.put_object(
            Bucket="cloudtrain-test",
            Key=f"data/{index // 10}/{index:03d}",
            Body=f"{index:03d}" * size,
        )


def test_a_sample_is_spread_over_all_objects(s3: Any, change: Change) -> None:
    put(s3, 40)
    s3.put_object(Bucket="cloudtrain-test", Key="data-old/other", Body="not of this channel")
    spec, (check,) = change(Sample(4, None))
    assert content(spec) == {
        f"{index // 10}/{index:03d}": f"{index:03d}" * 10 for index in (0, 10, 20, 30)
    }
    channel = spec.data["train"]
    assert (channel.mode, channel.sharded, spec.data["labels"].uri) == ("FastFile", True, "labels")
    assert (check.name, check.result) == ("starts", Result.PASS)
    assert check.detail == "channel train: 4 of 40 objects (120 B of 1.2 KB) were read"


def test_bytes_limit_a_sample_to_complete_objects(s3: Any, change: Change) -> None:
    put(s3, 20)
    s3.put_object(Bucket="cloudtrain-test", Key="data/9/large", Body="x" * 100_000)
    spec, (check,) = change(Sample(None, 20_000))
    assert set(content(spec).values()) == {
        f"{index:03d}" * 10 for index in map(int, [n[-3:] for n in content(spec)])
    }
    assert check.result is Result.PASS
    with pytest.raises(
        UserError, match=r"the smallest object, s3://cloudtrain-test/data/0/000, has 30 B"
    ):
        change(Sample(None, 29))


def test_a_refused_object_is_named_with_its_permission(server: S3Server, change: Change) -> None:
    import boto3

    s3 = boto3.client("s3")
    s3.create_bucket(
        Bucket="cloudtrain-test", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    put(s3, 3)
    server.set_faults(FaultPlan(operations="GetObject|HeadObject", denied=1.0))
    with pytest.raises(CloudError, match="s3:GetObject on arn:aws:s3:::cloudtrain-test/data/0/000"):
        change(Sample())
    server.set_faults(FaultPlan(denied=1.0))
    with pytest.raises(CloudError, match="s3:ListBucket on arn:aws:s3:::cloudtrain-test"):
        change(Sample())


def test_a_channel_without_objects_ends_the_rehearsal(s3: Any, change: Change) -> None:
    with pytest.raises(UserError, match="there are no objects below s3://cloudtrain-test/data"):
        change(Sample())


def test_fewer_objects_than_instances_fail_the_start(s3: Any, change: Change) -> None:
    put(s3, 1)
    _, (check,) = change(Sample())
    assert check.result is Result.FAIL
    assert "some instances would get none" in check.detail


@pytest.mark.parametrize(
    ("text", "sample"),
    [("64", Sample(64, None)), ("200MB", Sample(None, 200_000_000)), ("1", Sample(1, None))],
)
def test_a_sample_is_a_number_of_objects_or_a_size(text: str, sample: Sample) -> None:
    assert parse_sample(text) == sample


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5", "0MB", ""])
def test_other_samples_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected a number of objects such as 64, or a size such as 200MB"
    ):
        parse_sample(text)
