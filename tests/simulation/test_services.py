"""The account in memory answers as moto does over HTTP: one suite of calls, and both must pass it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from simulation.network import Network
from simulation.services import Account
from simulation.world import World

BUCKET = "cloudtrain-test"
JOB = {
    "TrainingJobName": "demo",
    "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
    "RoleArn": "arn:aws:iam::123456789012:role/training",
    "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/output"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    "Tags": [{"Key": "cloudtrain:request", "Value": "1a2b3c"}],
}
Clients = Callable[[str], Any]


def code_of(call: Callable[..., Any], **given: Any) -> str:
    """Return the error code with which AWS refuses a call."""
    with pytest.raises(ClientError) as refused:
        call(**given)
    return str(refused.value.response["Error"]["Code"])


def check_conditional_writes(client: Clients) -> None:
    s3, place = client("s3"), {"Bucket": BUCKET, "Key": "requests/1.json"}
    assert code_of(s3.get_object, **place) == "NoSuchKey"
    first = s3.put_object(**place, Body=b"one", IfNoneMatch="*")
    assert code_of(s3.put_object, **place, Body=b"two", IfNoneMatch="*") == "PreconditionFailed"
    s3.put_object(**place, Body=b"three", IfMatch=first["ETag"])
    refused = code_of(s3.put_object, **place, Body=b"four", IfMatch=first["ETag"])
    assert refused == "PreconditionFailed"
    found = s3.get_object(**place)
    assert found["Body"].read() == b"three"
    assert "date" in found["ResponseMetadata"]["HTTPHeaders"]


def check_objects(client: Clients) -> None:
    s3 = client("s3")
    assert code_of(s3.head_object, Bucket=BUCKET, Key="no") == "404"
    for key in ("a/1", "a/2 &", "b/1"):
        given = {"Body": key.encode(), "Metadata": {"writer": "me"}}
        s3.put_object(Bucket=BUCKET, Key=key, ChecksumAlgorithm="SHA256", **given)
    listed = s3.list_objects_v2(Bucket=BUCKET, Prefix="a/")["Contents"]
    assert [(each["Key"], each["Size"]) for each in listed] == [("a/1", 3), ("a/2 &", 5)]
    head = s3.head_object(Bucket=BUCKET, Key="a/1", ChecksumMode="ENABLED")
    assert head["ContentLength"] == 3
    assert head["Metadata"] == {"writer": "me"}
    assert head["ChecksumSHA256"] == "dzIyq+k0Pw4QL4JIQj/Gzux9CsP08BRKs72IoGEb5Sk="
    s3.delete_object(Bucket=BUCKET, Key="a/1")
    assert code_of(s3.get_object, Bucket=BUCKET, Key="a/1") == "NoSuchKey"
    assert code_of(s3.get_object, Bucket="not-there", Key="a/1") == "NoSuchBucket"


def check_training_jobs(client: Clients) -> None:
    sagemaker = client("sagemaker")
    missing = code_of(sagemaker.describe_training_job, TrainingJobName="demo")
    assert missing == "ValidationException"
    arn = sagemaker.create_training_job(**JOB)["TrainingJobArn"]
    job = sagemaker.describe_training_job(TrainingJobName="demo")
    assert job["TrainingJobArn"] == arn
    assert job["ResourceConfig"] == JOB["ResourceConfig"]
    assert job["SecondaryStatusTransitions"]
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == JOB["Tags"]


def check_names_of_training_jobs(client: Clients) -> None:
    """Moto accepts a name twice. AWS answers ResourceInUse (API reference of CreateTrainingJob), as the sandbox does."""
    sagemaker = client("sagemaker")
    sagemaker.create_training_job(**JOB)
    assert code_of(sagemaker.create_training_job, **JOB) == "ResourceInUse"


SUITE = (check_conditional_writes, check_objects, check_training_jobs)


@pytest.mark.parametrize("check", [*SUITE, check_names_of_training_jobs])
def test_the_account_in_memory(check: Callable[[Clients], None]) -> None:
    world = World(0)
    account = Account(lambda: world.now)
    account.buckets[BUCKET] = {}
    Network(world, account)
    session = boto3.Session("key", "secret", region_name="us-west-2")
    actor = world.start("client", lambda: check(session.client))
    world.run()
    if actor.error is not None:
        raise actor.error


@pytest.mark.aws
@pytest.mark.parametrize("check", SUITE)
def test_moto(check: Callable[[Clients], None], aws: dict[str, str]) -> None:
    check(boto3.client)
