"""The sandbox rejects invalid requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.sandboxes import Served, request

from cloudtrain.backends.sandbox.request_validation import ServiceError, check_create, check_role

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "unit" / "golden" / "request-everything.json").read_text()
)
Change = Callable[[dict[str, Any]], object]


def _with(change: Change) -> dict[str, Any]:
    document = copy.deepcopy(GOLDEN)
    change(document)
    return document


def test_a_request_with_all_fields_is_valid() -> None:
    check_create(GOLDEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r.update(TrainingJobName="-x"),
            (
                "1 validation error detected: Value at 'trainingJobName' failed to satisfy constraint: "
                "'-x' has a form that AWS refuses"
            ),
        ),
        (
            lambda r: r["StoppingCondition"].update(MaxRuntimeInSeconds=0),
            (
                "Value at 'stoppingCondition.maxRuntimeInSeconds' failed to satisfy constraint: "
                "AWS allows at least 1, got 0"
            ),
        ),
        (
            lambda r: r["ResourceConfig"].update(InstanceType="ml.p4"),
            "at 'resourceConfig.instanceType' failed to satisfy constraint: expected one of AWS's",
        ),
        (
            lambda r: r["InputDataConfig"][0].update(ChannelName="x" * 65),
            (
                "at 'inputDataConfig.1.member.channelName' failed to satisfy constraint: "
                "AWS allows at most 64 characters, got 65"
            ),
        ),
        (
            lambda r: r["Environment"].update({"A": "x" * 513}),
            "at 'environment.A' failed to satisfy constraint",
        ),
        (
            lambda r: r["Environment"].update({"1": "x"}),
            "Value at 'environment.1' failed to satisfy constraint: name: ",
        ),
        (
            lambda r: r.pop("RoleArn"),
            "Value at 'roleArn' failed to satisfy constraint: required field is missing",
        ),
        (lambda r: r.update(TrainingJobName="-", RoleArn="x"), "3 validation errors detected: "),
        (
            lambda r: r["StoppingCondition"].update(MaxWaitTimeInSeconds=1),
            "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds",
        ),
        (
            lambda r: r.pop("EnableManagedSpotTraining"),
            "Invalid MaxWaitTimeInSeconds. It is only supported when EnableManagedSpotTraining is set to true",
        ),
        (lambda r: r["Tags"].append({"Key": "TEAM", "Value": "x"}), "Duplicate tag keys found."),
        (lambda r: r["InputDataConfig"].append(r["InputDataConfig"][0]), "Duplicate channel names"),
        (
            lambda r: r["ResourceConfig"].update(KeepAlivePeriodInSeconds=60),
            "KeepAlivePeriodInSeconds is not supported",
        ),
        (
            lambda r: r["ResourceConfig"].pop("InstanceCount"),
            "ResourceConfig must have InstanceType and InstanceCount",
        ),
        (
            lambda r: r["AlgorithmSpecification"].update(AlgorithmName="a"),
            "Either TrainingImage or AlgorithmName",
        ),
        (
            lambda r: r["AlgorithmSpecification"]["MetricDefinitions"][0].update(Regex="("),
            "Invalid regex for metric train/loss",
        ),
        (
            lambda r: r["HyperParameters"].pop("sagemaker_program"),
            "cloudtrain sandbox: the sandbox starts no image",
        ),
        (
            lambda r: r["InputDataConfig"][1].update(InputMode="Pipe"),
            "cloudtrain sandbox: channel train: Pipe mode is not supported",
        ),
        (
            lambda r: r["InputDataConfig"][1]["DataSource"]["S3DataSource"].update(
                S3DataType="ManifestFile"
            ),
            "cloudtrain sandbox: channel train: S3DataType ManifestFile is not supported",
        ),
    ],
)
def test_invalid_requests_are_rejected_with_the_field(change: Change, message: str) -> None:
    with pytest.raises(ServiceError) as rejected:
        check_create(_with(change))
    assert rejected.value.code == "ValidationException"
    assert message in rejected.value.message


def test_role_must_trust_sagemaker_and_be_of_the_account() -> None:
    with pytest.raises(
        ServiceError, match="Could not assume role arn:aws:iam::123456789012:role/training"
    ):
        check_role(GOLDEN, None)
    with pytest.raises(ServiceError, match="Could not assume role"):
        check_role(GOLDEN, '{"Principal": {"Service": "ec2.amazonaws.com"}}')
    with pytest.raises(ServiceError, match="Cross-account"):
        check_role({"RoleArn": "arn:aws:iam::999999999999:role/x"}, "sagemaker.amazonaws.com")
    check_role(GOLDEN, '{"Principal": {"Service": "sagemaker.amazonaws.com"}}')


@pytest.mark.aws
def test_rejections_reach_clients_as_aws_exceptions(sandbox: Served) -> None:
    sandbox.create("twice", "true")
    with pytest.raises(
        ClientError, match=r"ResourceInUse.* must be unique within an AWS account and region"
    ):
        sandbox.create("twice", "true")
    with pytest.raises(ClientError, match="Could not assume role"):
        sandbox.create("no-role", "true", RoleArn="arn:aws:iam::123456789012:role/missing")
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://not-there/data"}
    channel = {"ChannelName": "train", "DataSource": {"S3DataSource": source}}
    with pytest.raises(ClientError, match='No S3 objects found under S3 URL "s3://not-there/data"'):
        sandbox.create("no-data", "true", InputDataConfig=[channel])
    with pytest.raises(ClientError, match="Requested resource not found"):
        sandbox.describe("no-data")
    assert sandbox.end_of("twice")["TrainingJobStatus"] == "Completed"


@pytest.mark.aws
def test_jobs_are_listed_by_name_status_and_time_page_by_page(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    names = [f"paged-{index}" for index in range(5)]
    for name in names:
        client.create_training_job(**request(sandbox, name, "true"))
    first = client.list_training_jobs(NameContains="paged-", MaxResults=2, SortBy="Name")
    # The new job sorts before the first page. It must not shift the next page.
    client.create_training_job(**request(sandbox, "paged-00", "true"))
    rest = client.list_training_jobs(
        NameContains="paged-", MaxResults=9, SortBy="Name", NextToken=first["NextToken"]
    )
    found = [
        job["TrainingJobName"] for page in (first, rest) for job in page["TrainingJobSummaries"]
    ]
    assert found == names
    pages = client.get_paginator("list_training_jobs").paginate(
        NameContains="paged-",
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"PageSize": 2},
    )
    listed = [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]
    assert listed == ["paged-00", *reversed(names)]
    for name in names:
        sandbox.end_of(name)
    created = sandbox.describe("paged-2")["CreationTime"]
    hour = timedelta(hours=1)
    for since, count in ((created - hour, 6), (created + hour, 0)):
        listed = client.list_training_jobs(NameContains="paged-", CreationTimeAfter=since)[
            "TrainingJobSummaries"
        ]
        assert len(listed) == count
    none = client.list_training_jobs(NameContains="paged-", StatusEquals="Failed")
    assert none["TrainingJobSummaries"] == []
