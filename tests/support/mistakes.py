"""Mistakes that people make with training jobs, each as a job file, a raw CreateTrainingJob call and an estimator.

This module contains data only. `mistakes_table.py` runs the tools and writes docs/reference/mistakes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOB = """\
name: pretrain
code:
  task: gpt:GPT
  directory: .
  args: {layers: 4}
  requirements: requirements.txt
  env: {NCCL_DEBUG: INFO}
cluster:
  instance_type: ml.p4d.24xlarge
  instances: 2
  distribution: torch_distributed
data:
  train: s3://my-bucket/tokens
train:
  epochs: 3
  batch_size: 16
  learning_rate: 3.0e-4
checkpoint: {uri: s3://my-bucket/pretrain}
limits: {runtime: 24h}
tags: {team: vision}
"""
"""A valid job. The text that a mistake replaces must occur exactly once."""

FILES: Mapping[str, str | Path] = {
    "gpt.py": "class GPT(Task):\n    def __init__(self, layers=2): ...\n",
    "train.py": "print('training')\n",
    "requirements.txt": "einops\n",
}
"""The code folder beside the job file."""

ROLE = "arn:aws:iam::123456789012:role/training"
REGISTRY = "763104351884.dkr.ecr.us-west-2.amazonaws.com"
IMAGE = f"{REGISTRY}/pytorch:2.14-cu133-amzn2023-sagemaker"
HYPERPARAMETERS = {
    "model": "gpt:GPT",
    "layers": "4",
    "epochs": "3",
    "batch_size": "16",
    "learning_rate": "3.0e-4",
}


def channels(**uris: str) -> list[dict[str, Any]]:
    """Return InputDataConfig of channels in S3."""
    return [channel(name, uri) for name, uri in uris.items()]


def channel(name: str, uri: str) -> dict[str, Any]:
    """Return one entry of InputDataConfig."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


REQUEST: Mapping[str, Any] = {
    "TrainingJobName": "pretrain",
    "RoleArn": ROLE,
    "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "File"},
    "HyperParameters": {
        **HYPERPARAMETERS,
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "s3://cloudtrain-test/code/sourcedir.tar.gz",
        "sagemaker_torch_distributed_enabled": "true",
    },
    "InputDataConfig": channels(train="s3://my-bucket/tokens"),
    "OutputDataConfig": {"S3OutputPath": "s3://cloudtrain-test/output"},
    "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "Environment": {"NCCL_DEBUG": "INFO"},
    "CheckpointConfig": {"S3Uri": "s3://my-bucket/pretrain"},
    "Tags": [{"Key": "team", "Value": "vision"}],
}
"""The same job as a CreateTrainingJob document."""

ESTIMATOR: Mapping[str, Any] = {
    "entry_point": "train.py",
    "role": ROLE,
    "image_uri": IMAGE,
    "instance_type": "ml.p4d.24xlarge",
    "instance_count": 2,
    "distribution": {"torch_distributed": {"enabled": True}},
    "hyperparameters": HYPERPARAMETERS,
    "environment": {"NCCL_DEBUG": "INFO"},
    "max_run": 86400,
    "output_path": "s3://cloudtrain-test/output",
    "checkpoint_s3_uri": "s3://my-bucket/pretrain",
    "tags": [{"Key": "team", "Value": "vision"}],
    "debugger_hook_config": False,
    "disable_profiler": True,
}
"""The same job as arguments of `sagemaker.pytorch.PyTorch`; source_dir is the code folder."""

FIT: Mapping[str, Any] = {"inputs": {"train": "s3://my-bucket/tokens"}, "job_name": "pretrain"}
"""The same job as arguments of the estimator's `fit`."""

REMOVED = object()
"""Value of a change that removes a key or file."""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        title: Description for the table.
        job: Text of `JOB` and its replacement. The mistake is the part between guillemets: cloudtrain must report a
            place inside of it.
        files: Changed files of the code folder: their content, a path to create a link to a file there, or `REMOVED`.
        file: For a mistake in the code folder only: the file that the message must name.
        request: Changes of `REQUEST` by dotted path, or None if the mistake is impossible in this form.
        estimator: Changes of `ESTIMATOR`, or None if the mistake is impossible in this form.
        fit: Changes of `FIT`.
    """

    title: str
    job: tuple[str, str] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    request: Mapping[str, Any] | None = None
    estimator: Mapping[str, Any] | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)


def _hyperparameter(**changes: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the same hyperparameters as changes of the request and of the estimator."""
    request = {f"HyperParameters.{name}": value for name, value in changes.items()}
    return request, {"hyperparameters": {**HYPERPARAMETERS, **changes}}


_WRONG_CLASS = _hyperparameter(model="gpt:GTP")
_WRONG_ARGUMENT = _hyperparameter(layrs="4")
_TWO_LENGTHS = _hyperparameter(steps="1000")
_WRONG_SPLIT = _hyperparameter(early_stopping="valid/loss")
_TAGS = [{"Key": f"team-{index}", "Value": "vision"} for index in range(51)]
_LONG = "x" * 520
_SMDDP = {"smdistributed": {"dataparallel": {"enabled": True}}}
_SMDDP_REQUEST = {
    "HyperParameters.sagemaker_torch_distributed_enabled": REMOVED,
    "HyperParameters.sagemaker_distributed_dataparallel_enabled": "true",
}
_SMDDP_IMAGE = f"{REGISTRY}/pytorch-training:2.5.1-gpu-py311-cu124-ubuntu22.04-sagemaker"

MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "A field is misspelled",
        ("instances: 2", "instances: 2\n  «keep_alve»: 30m"),
        request={"ResourceConfig.KeepAlivePeriodInSecnds": 1800},
        estimator={"keep_alive_period_in_secnds": 1800},
    ),
    Mistake(
        "A number is written as a word",
        ("instances: 2", "instances: «two»"),
        request={"ResourceConfig.InstanceCount": "two"},
        estimator={"instance_count": "two"},
    ),
    Mistake(
        "A field is given twice",
        ("distribution: torch_distributed", "distribution: auto\n  «instances: 4»"),
    ),
    Mistake("A line is indented with a tab", ("  instances: 2", "«\tinstances: 2»")),
    Mistake(
        "Spot is given a duration instead of true",
        ("instances: 2", "instances: 2\n  spot: «36h»"),
        request={"EnableManagedSpotTraining": "36h"},
        estimator={"use_spot_instances": "36h"},
    ),
    Mistake(
        "A duration has no unit: hours were meant",
        ("{runtime: 24h}", "{runtime: «24»}"),
        request={"StoppingCondition.MaxRuntimeInSeconds": 24},
        estimator={"max_run": 24},
    ),
    Mistake(
        "An instance type lacks `ml.`",
        ("ml.p4d.24xlarge", "«p4d.24xlarge»"),
        request={"ResourceConfig.InstanceType": "p4d.24xlarge"},
        estimator={"instance_type": "p4d.24xlarge"},
    ),
    Mistake(
        "An instance type has a typing error",
        ("ml.p4d.24xlarge", "«ml.p4d.24xlrge»"),
        request={"ResourceConfig.InstanceType": "ml.p4d.24xlrge"},
        estimator={"instance_type": "ml.p4d.24xlrge"},
    ),
    Mistake(
        "Zero instances",
        ("instances: 2", "instances: «0»"),
        request={"ResourceConfig.InstanceCount": 0},
        estimator={"instance_count": 0},
    ),
    Mistake(
        "An unknown distribution",
        ("distribution: torch_distributed", "distribution: «ddp»"),
        request={"HyperParameters.sagemaker_ddp_enabled": "true"},
        estimator={"distribution": {"ddp": {"enabled": True}}},
    ),
    Mistake(
        "SMDDP on a type that it does not support",
        (
            "instance_type: ml.p4d.24xlarge\n  instances: 2\n  distribution: torch_distributed",
            "«instance_type: ml.g6.48xlarge\n  instances: 2\n  distribution: smdistributed»",
        ),
        request={
            **_SMDDP_REQUEST,
            "ResourceConfig.InstanceType": "ml.g6.48xlarge",
            "AlgorithmSpecification.TrainingImage": _SMDDP_IMAGE,
        },
        estimator={
            "instance_type": "ml.g6.48xlarge",
            "distribution": _SMDDP,
            "image_uri": _SMDDP_IMAGE,
        },
    ),
    Mistake(
        "SMDDP in a container without it",
        ("distribution: torch_distributed", '«distribution: smdistributed\n  framework: "2.13"»'),
        request=_SMDDP_REQUEST,
        estimator={"distribution": _SMDDP},
    ),
    Mistake(
        "A PyTorch version without a container of AWS",
        ("instances: 2", 'instances: 2\n  framework: «"1.14"»'),
        request={
            "AlgorithmSpecification.TrainingImage": f"{REGISTRY}/pytorch:1.14-cu117-amzn2023-sagemaker"
        },
        estimator={"image_uri": REMOVED, "framework_version": "1.14.0", "py_version": "py39"},
    ),
    Mistake(
        "A CUDA container on Trainium",
        ("ml.p4d.24xlarge", "«ml.trn1.32xlarge»"),
        request={"ResourceConfig.InstanceType": "ml.trn1.32xlarge"},
        estimator={"instance_type": "ml.trn1.32xlarge"},
    ),
    Mistake(
        "Spot together with a warm pool",
        ("instances: 2", "instances: 2\n  «spot: true\n  keep_alive: 30m»"),
        request={
            "EnableManagedSpotTraining": True,
            "StoppingCondition.MaxWaitTimeInSeconds": 172800,
            "ResourceConfig.KeepAlivePeriodInSeconds": 1800,
        },
        estimator={
            "use_spot_instances": True,
            "max_wait": 172800,
            "keep_alive_period_in_seconds": 1800,
        },
    ),
    Mistake(
        "The wait limit of Spot is shorter than the runtime",
        ("instances: 2", "instances: 2\n  spot: {max_wait: «1h»}"),
        request={"EnableManagedSpotTraining": True, "StoppingCondition.MaxWaitTimeInSeconds": 3600},
        estimator={"use_spot_instances": True, "max_wait": 3600},
    ),
    Mistake(
        "The limit of the pending time is below AWS's minimum",
        ("instances: 2", "instances: 2\n  max_pending: «5m»"),
        request={"StoppingCondition.MaxPendingTimeInSeconds": 300},
    ),
    Mistake(
        "Subnets without security groups",
        ("instances: 2", "instances: 2\n  «network: {subnets: [subnet-0a1b2c3d]}»"),
        request={"VpcConfig": {"Subnets": ["subnet-0a1b2c3d"]}},
        estimator={"subnets": ["subnet-0a1b2c3d"]},
    ),
    Mistake("Both a Task and a script", ("task: gpt:GPT", "«task: gpt:GPT\n  script: train.py»")),
    Mistake(
        "The file of the entry point does not exist",
        ("gpt:GPT", "«gtp:GPT»"),
        request={"HyperParameters.sagemaker_program": "trian.py"},
        estimator={"entry_point": "trian.py"},
    ),
    Mistake(
        "The file of the entry point is ignored by .gitignore, so it is not uploaded",
        ("gpt:GPT", "«gpt:GPT»"),
        {".gitignore": "gpt*\n"},
    ),
    Mistake(
        "The name of the class is wrong",
        ("gpt:GPT", "«gpt:GTP»"),
        request=_WRONG_CLASS[0],
        estimator=_WRONG_CLASS[1],
    ),
    Mistake(
        "The name of an argument is wrong",
        ("{layers: 4}", "{«layrs: 4»}"),
        request=_WRONG_ARGUMENT[0],
        estimator=_WRONG_ARGUMENT[1],
    ),
    Mistake(
        "The name of the requirements file is wrong", ("requirements.txt", "«requirments.txt»")
    ),
    Mistake(
        "setup.py at the root: AWS's toolkit would install it and fail",
        files={"setup.py": ""},
        file="setup.py",
        estimator={},
    ),
    Mistake(
        "A link to a file outside of the code folder: the estimator packs that file",
        files={"tokens.txt": Path("../elsewhere.txt")},
        file="tokens.txt",
        estimator={},
    ),
    Mistake(
        "An environment variable has a hyphen in its name",
        ("NCCL_DEBUG: INFO", "«NCCL-DEBUG: INFO»"),
        request={"Environment": {"NCCL-DEBUG": "INFO"}},
        estimator={"environment": {"NCCL-DEBUG": "INFO"}},
    ),
    Mistake(
        "An environment variable is longer than 512 characters",
        ("NCCL_DEBUG: INFO", f"«NCCL_DEBUG: {_LONG}»"),
        request={"Environment.NCCL_DEBUG": _LONG},
        estimator={"environment": {"NCCL_DEBUG": _LONG}},
    ),
    Mistake(
        "An S3 URI with one slash",
        ("s3://my-bucket/tokens", "«s3:/my-bucket/tokens»"),
        request={"InputDataConfig": channels(train="s3:/my-bucket/tokens")},
        estimator={},
        fit={"inputs": {"train": "s3:/my-bucket/tokens"}},
    ),
    Mistake(
        "A bucket name with uppercase letters",
        ("s3://my-bucket/tokens", "«s3://My-Bucket/tokens»"),
        request={"InputDataConfig": channels(train="s3://My-Bucket/tokens")},
        estimator={},
        fit={"inputs": {"train": "s3://My-Bucket/tokens"}},
    ),
    Mistake(
        "A channel with a space in its name",
        ("train: s3://my-bucket/tokens", "«train tokens: s3://my-bucket/tokens»"),
        request={"InputDataConfig": [channel("train tokens", "s3://my-bucket/tokens")]},
        estimator={},
        fit={"inputs": {"train tokens": "s3://my-bucket/tokens"}},
    ),
    Mistake(
        "Two channels with the same variable, SM_CHANNEL_TRAIN",
        (
            "train: s3://my-bucket/tokens",
            "«train: s3://my-bucket/tokens\n  Train: s3://my-bucket/more»",
        ),
        request={
            "InputDataConfig": channels(train="s3://my-bucket/tokens", Train="s3://my-bucket/more")
        },
        estimator={},
        fit={"inputs": {"train": "s3://my-bucket/tokens", "Train": "s3://my-bucket/more"}},
    ),
    Mistake(
        "The checkpoint URI is a local folder",
        ("s3://my-bucket/pretrain", "«./checkpoints»"),
        request={"CheckpointConfig.S3Uri": "./checkpoints"},
        estimator={"checkpoint_s3_uri": "./checkpoints"},
    ),
    Mistake(
        "Both epochs and steps",
        ("epochs: 3", "«epochs: 3\n  steps: 1000»"),
        request=_TWO_LENGTHS[0],
        estimator=_TWO_LENGTHS[1],
    ),
    Mistake(
        "Early stopping compares a split that does not exist",
        ("epochs: 3", "epochs: 3\n  early_stopping: {metric: «valid/loss»}"),
        request=_WRONG_SPLIT[0],
        estimator=_WRONG_SPLIT[1],
    ),
    Mistake(
        "An underscore in the job's name",
        ("name: pretrain", "name: «pre_train»"),
        request={"TrainingJobName": "pre_train"},
        estimator={},
        fit={"job_name": "pre_train"},
    ),
    Mistake(
        "A runtime over 28 days",
        ("{runtime: 24h}", "{runtime: «30d»}"),
        request={"StoppingCondition.MaxRuntimeInSeconds": 2592000},
        estimator={"max_run": 2592000},
    ),
    Mistake(
        "More than 30 retries",
        ("{runtime: 24h}", "{runtime: 24h, retries: «31»}"),
        request={"RetryStrategy": {"MaximumRetryAttempts": 31}},
        estimator={"max_retry_attempts": 31},
    ),
    Mistake(
        "More than 50 tags",
        ("{team: vision}", "«{" + ", ".join(f"team-{index}: vision" for index in range(51)) + "}»"),
        request={"Tags": _TAGS},
        estimator={"tags": _TAGS},
    ),
    Mistake(
        "A tag with a name that AWS reserves",
        ("{team: vision}", "{«aws:team: vision»}"),
        request={"Tags": [{"Key": "aws:team", "Value": "vision"}]},
        estimator={"tags": [{"Key": "aws:team", "Value": "vision"}]},
    ),
)
