"""Jobs, objects and assertions that the tests of preflight checks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.support.checks import Check, Result
from cloudtrain_runtime.contract.manifest import Manifest, StoredFile, checkpoint_folder_name

ACCOUNT = "123456789012"

ENOUGH = {
    f"{kind} for {use}": 8
    for kind in ("ml.p4d.24xlarge", "ml.m5.xlarge", "ml.g5.xlarge")
    for use in ("training job usage", "spot training job usage", "training warm pool usage")
} | {
    "Longest run time for a training job": 432_000,
    "Maximum number of instances per training job": 20,
    "Maximum number of instances per spot training job": 20,
    "Number of instances across all training jobs": 20,
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


def save(
    step: int,
    *,
    run: str = "other",
    size: int = 3,
    place: str = "saved",
    attempt: str = "",
    training: Mapping[str, Any] | None = None,
    time: float | None = None,
) -> str:
    """Write a checkpoint of one file; return its folder. With another size than 3 it is incomplete."""
    folder = f"{place}/{checkpoint_folder_name(step, attempt)}"
    put(f"{folder}/__0_0.distcp", b"123")
    manifest = Manifest(
        run=run,
        attempt=attempt or "0a1b2c3d",
        step=step,
        time=float(step) if time is None else time,
        world_size=1,
        mesh={},
        rng={},
        torch="2.13.0",
        code="",
        request="",
        state={"data": {"epoch": step // 10}},
        files={"__0_0.distcp": StoredFile(size, (0,))},
        training=training or {},
    )
    put(f"{folder}/manifest.json", manifest.to_json().encode())
    return folder


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
        ResourceConfig={
            "InstanceType": "ml.m5.xlarge",
            "InstanceCount": instances,
            "VolumeSizeInGB": 1,
        },
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
