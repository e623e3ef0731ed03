"""Jobs, objects and assertions that the tests of preflight checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudtrain.preflight import Check, Result

ACCOUNT = "123456789012"

ENOUGH = {
    f"{kind} for {use}": 8
    for kind in ("ml.p4d.24xlarge", "ml.m5.xlarge", "ml.g5.xlarge")
    for use in ("training job usage", "spot training job usage", "training warm pool usage")
}

JOB = """\
name: demo
code: {task: "mine:Mine"}
cluster: {instance_type: ml.m5.xlarge, instances: 2}
data: {train: "s3://cloudtrain-test/numbers/"}
train: {epochs: 1}
checkpoint: {uri: "s3://cloudtrain-test/saved"}
"""

SCRIPT = """\
name: demo
code: {script: train.py}
cluster: {instance_type: ml.m5.xlarge}
checkpoint: {uri: "s3://cloudtrain-test/saved"}
"""


def client(service: str, **options: Any) -> Any:
    """Return a boto3 client of the test's account."""
    import boto3

    return boto3.client(service, **options)


def put(key: str, body: bytes = b"", bucket: str = "cloudtrain-test") -> None:
    """Write an object."""
    client("s3").put_object(Bucket=bucket, Key=key, Body=body)


Checks = Callable[..., dict[str, Check]]


def only_failure(found: dict[str, Check], name: str) -> Check:
    """Return the one check that failed."""
    assert [each.name for each in found.values() if each.result is Result.FAIL] == [name]
    assert found[name].fix, "a failure without a fix"
    return found[name]


def start_job(name: str, instances: int, **more: Any) -> None:
    """Create a training job in moto, where it ends at once."""
    client("sagemaker").create_training_job(
        TrainingJobName=name,
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn=f"arn:aws:iam::{ACCOUNT}:role/training",
        OutputDataConfig={"S3OutputPath": "s3://cloudtrain-test/x"},
        ResourceConfig={"InstanceType": "ml.m5.xlarge", "InstanceCount": instances, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 60},
        **more,
    )


def budget(limit: float, spent: float, **more: Any) -> dict[str, Any]:
    """Return a monthly budget as DescribeBudgets returns it."""
    return {
        "BudgetName": "training",
        "BudgetLimit": {"Amount": str(limit), "Unit": "USD"},
        "TimeUnit": "MONTHLY",
        "BudgetType": "COST",
        "CalculatedSpend": {"ActualSpend": {"Amount": str(spent), "Unit": "USD"}},
        **more,
    }
