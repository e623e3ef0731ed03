"""Jobs in two forms: as a job file, and as arguments of `sagemaker.pytorch.PyTorch`.

Both forms of each level are written by hand, so that neither depends on a plan. A case has one level of each factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Case = Mapping[str, str]
"""Name of the chosen level by factor."""

_REGISTRY = "763104351884.dkr.ecr.us-west-2.amazonaws.com"
_NEWEST = f"{_REGISTRY}/pytorch:2.14-cu133-amzn2023-sagemaker"
_NEWEST_WITH_SMDDP = f"{_REGISTRY}/pytorch-training:2.5.1-gpu-py311-cu124-ubuntu22.04-sagemaker"
_OWN_IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"
_PRIVATE_IMAGE = "registry.example.com/train:1"
_LAMBDA = "arn:aws:lambda:us-west-2:123456789012:function:login"
_TRAINING_PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
_LUSTRE = "fs-0123456789abcdef0"
_KEY = "arn:aws:kms:us-west-2:123456789012:key/0a1b2c3d-0a1b-2c3d-4e5f-0a1b2c3d4e5f"
_BASE = "s3://cloudtrain-test/cloudtrain"
_JOB_TAG = {"Key": "cloudtrain:job", "Value": "demo"}

DIGEST = "d" * 64
"""Digest of the code bundle."""

JOB = {"name": "demo", "cluster": {"instance_type": "ml.p4d.24xlarge"}}
SETTINGS = {
    "role": "arn:aws:iam::123456789012:role/training",
    "bucket": "cloudtrain-test",
    "region": "us-west-2",
}

BY_HAND: Mapping[str, Any] = {
    "role": "arn:aws:iam::123456789012:role/training",
    "entry_point": "cloudtrain_worker.py",
    "source_dir": f"{_BASE}/code/{DIGEST}/sourcedir.tar.gz",
    "output_path": _BASE,
    "instance_type": "ml.p4d.24xlarge",
    "instance_count": 1,
    "debugger_hook_config": False,
    "disable_profiler": True,
    "metric_definitions": [
        {"Name": "train/loss", "Regex": r'CLOUDTRAIN \{"event": "step".*"loss": ([-+0-9.eE]+)'},
        *(
            {
                "Name": f"train/{name}",
                "Regex": rf'CLOUDTRAIN \{{"event": "step".*"{field}": ([-+0-9.eE]+)',
            }
            for name, field in (
                ("samples_per_second", "samples_per_second"),
                ("tokens_per_second", "tokens_per_second"),
                ("data_wait", "data_wait"),
                *(
                    (f"{part}_seconds", part)
                    for part in ("data", "forward", "backward", "optimizer", "checkpoint")
                ),
                ("mfu", "mfu"),
                ("memory_bytes", "memory_bytes"),
                ("learning_rate", "learning_rate"),
                ("grad_norm", "grad_norm"),
            )
        ),
        *(
            {
                "Name": f"{split}/{name}",
                "Regex": rf'CLOUDTRAIN \{{"event": "evaluation".*"split": "{split}".*"{name}": ([-+0-9.eE]+)',
            }
            for split in ("validation", "test")
            for name in ("loss", "accuracy")
        ),
    ],
}
"""Arguments of the estimator that all jobs share."""

_LAUNCHER = [
    "/bin/bash",
    "-ec",
    (
        'trap "exit 143" TERM; m="${CLOUDTRAIN_ML_ROOT:-/opt/ml}"; mkdir -p "$m/code"; cd "$m/code"; '
        'tar -xzf "$m/input/data/code/sourcedir.tar.gz" --no-same-owner --no-same-permissions; '
        'exec "$(command -v python||echo python3)" -m cloudtrain_runtime.launch'
    ),
]


@dataclass(frozen=True)
class Level:
    """One value of a factor.

    Attributes:
        job: Fields of the job file, by dotted path.
        settings: Settings of the account.
        arguments: Equivalent arguments of the estimator. `tensorboard_output_config` holds the arguments of its class.
        inputs: Equivalent channels: arguments of `TrainingInput`, or of `FileSystemInput`, by channel name.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# Fields that v2 of the SDK has an argument for belong here, as a new factor or a new level. Fields without an argument
# (MaxPendingTimeInSeconds, InstancePreferences, MlflowConfig) are tested with the hook that adds them to the request.
FACTORS: Mapping[str, Mapping[str, Level]] = {
    "distribution": {
        "torch_distributed": Level(
            {"cluster.distribution": "torch_distributed"},
            arguments={
                "distribution": {"torch_distributed": {"enabled": True}},
                "container_entry_point": _LAUNCHER,
            },
        ),
        "pytorchddp": Level(
            {"cluster.distribution": "pytorchddp"},
            arguments={"distribution": {"pytorchddp": {"enabled": True}}},
        ),
        "smdistributed": Level(
            {"cluster.distribution": "smdistributed"},
            arguments={"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}},
        ),
    },
    "image": {
        "default": Level(),
        "pinned": Level({"cluster.framework": "2.5"}, arguments={"image_uri": _NEWEST_WITH_SMDDP}),
        "own": Level({"cluster.image": _OWN_IMAGE}, arguments={"image_uri": _OWN_IMAGE}),
        "private": Level(
            {
                "cluster.image": {
                    "uri": _PRIVATE_IMAGE,
                    "private_registry": {"credentials": _LAMBDA},
                }
            },
            arguments={
                "image_uri": _PRIVATE_IMAGE,
                "training_repository_access_mode": "Vpc",
                "training_repository_credentials_provider_arn": _LAMBDA,
            },
        ),
    },
    "capacity": {
        "on-demand": Level(),
        "spot": Level(
            {"cluster.spot": True}, arguments={"use_spot_instances": True, "max_wait": 2 * 86400}
        ),
        "spot-bounded": Level(
            {"cluster.spot": {"max_wait": "36h"}, "limits.runtime": "12h", "limits.retries": 3},
            arguments={
                "use_spot_instances": True,
                "max_wait": 129600,
                "max_run": 43200,
                "max_retry_attempts": 3,
            },
        ),
        "warm": Level(
            {"cluster.keep_alive": "30m"}, arguments={"keep_alive_period_in_seconds": 1800}
        ),
        "training-plan": Level(
            {
                "cluster.training_plan": _TRAINING_PLAN,
                "cluster.health_check": True,
                "cluster.remote_debug": True,
            },
            arguments={
                "training_plan": _TRAINING_PLAN,
                "enable_infra_check": True,
                "enable_remote_debug": True,
            },
        ),
    },
    "network": {
        "none": Level(),
        "of-the-job": Level(
            {
                "cluster.network": {
                    "subnets": ["subnet-1a", "subnet-1b"],
                    "security_groups": ["sg-1a"],
                }
            },
            arguments={"subnets": ["subnet-1a", "subnet-1b"], "security_group_ids": ["sg-1a"]},
        ),
        "of-the-account-and-closed": Level(
            {"cluster.network": {"isolation": True, "encrypt_traffic": True}},
            {"subnets": ("subnet-9a",), "security_groups": ("sg-9a", "sg-9b")},
            {
                "subnets": ["subnet-9a"],
                "security_group_ids": ["sg-9a", "sg-9b"],
                "enable_network_isolation": True,
                "encrypt_inter_container_traffic": True,
            },
        ),
    },
    "data": {
        "none": Level(),
        "File": Level(
            {"data.train": "s3://my-bucket/train"},
            inputs={"train": {"s3_data": "s3://my-bucket/train"}},
        ),
        "FastFile": Level(
            {"data.train": {"uri": "s3://my-bucket/train", "mode": "FastFile"}},
            inputs={"train": {"s3_data": "s3://my-bucket/train", "input_mode": "FastFile"}},
        ),
        "sharded": Level(
            {
                "data.train": {"uri": "s3://my-bucket/train", "sharded": True},
                "data.validation": "s3://my-bucket/val",
            },
            inputs={
                "train": {"s3_data": "s3://my-bucket/train", "distribution": "ShardedByS3Key"},
                "validation": {"s3_data": "s3://my-bucket/val"},
            },
        ),
        "mounted": Level(
            {
                "data.train": {"fsx": _LUSTRE, "path": "/fsx/tokens"},
                "data.scratch": {"efs": "fs-89abcdef", "mount": "rw"},
            },
            inputs={
                "train": {
                    "file_system_id": _LUSTRE,
                    "file_system_type": "FSxLustre",
                    "directory_path": "/fsx/tokens",
                },
                "scratch": {
                    "file_system_id": "fs-89abcdef",
                    "file_system_type": "EFS",
                    "directory_path": "/",
                    "file_system_access_mode": "rw",
                },
            },
        ),
    },
    "output": {
        "default": Level(),
        "elsewhere-unpacked": Level(
            {"output": {"uri": "s3://my-bucket/models/", "compress": False}},
            arguments={"output_path": "s3://my-bucket/models", "disable_output_compression": True},
        ),
    },
    "entry": {
        "task": Level({"code.task": "mine:Mine", "train.epochs": 3}),
        "script": Level({"code.script": "train.py"}),
        "script-with-pipe": Level(  # a Task cannot read pipes
            {
                "code.script": "train.py",
                "data.piped": {"uri": "s3://my-bucket/piped", "mode": "Pipe"},
            },
            inputs={"piped": {"s3_data": "s3://my-bucket/piped", "input_mode": "Pipe"}},
        ),
        "script-with-tensorboard": Level(
            {"code.script": "train.py", "tracking.tensorboard": True},
            arguments={"tensorboard_output_config": {"s3_output_path": _BASE}},
        ),
    },
    "cluster": {
        "one": Level(),
        "four": Level(
            {
                "cluster.instance_type": "ml.p4de.24xlarge",
                "cluster.instances": 4,
                "cluster.volume": "500GB",
            },
            arguments={
                "instance_type": "ml.p4de.24xlarge",
                "instance_count": 4,
                "volume_size": 500,
            },
        ),
    },
    "key": {
        "none": Level(),
        # AWS rejects a volume key for types with local NVMe storage, such as p4d and p4de. `EBS` is a type without it.
        "of-the-account": Level(settings={"kms_key": _KEY}, arguments={"output_kms_key": _KEY}),
    },
    "tags": {
        "none": Level(arguments={"tags": [_JOB_TAG]}),
        "two": Level(
            {"tags": {"team": "vision", "cost-center": 42}},
            arguments={
                "tags": [
                    {"Key": "cost-center", "Value": "42"},
                    {"Key": "team", "Value": "vision"},
                    _JOB_TAG,
                ]
            },
        ),
    },
    "environment": {
        "none": Level(),
        "two": Level(
            {"code.env": {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": 8}},
            arguments={"environment": {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "8"}},
        ),
    },
}


def levels(case: Case) -> list[Level]:
    """Return the chosen levels of a case."""
    return [FACTORS[factor][name] for factor, name in case.items()]


def job_text(case: Case) -> str:
    """Return the job file of a case."""
    document: dict[str, Any] = {"name": JOB["name"]}
    given = {
        "cluster": JOB["cluster"],
        **{path: value for level in levels(case) for path, value in level.job.items()},
    }
    for path, value in given.items():
        *parents, name = path.split(".")
        target = document
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = dict(value) if isinstance(value, dict) else value
    return yaml.safe_dump(document, sort_keys=False)


def settings(case: Case) -> dict[str, Any]:
    """Return the account's settings of a case."""
    return {
        **SETTINGS,
        **{name: value for level in levels(case) for name, value in level.settings.items()},
    }


def by_hand(
    case: Case, run: str, identity: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the arguments of the estimator and of its channels for a case.

    Args:
        case: The case.
        run: Run id.
        identity: Digest of the request in the plan, the only value that is not written by hand.
    """
    arguments = dict(BY_HAND)
    inputs: dict[str, dict[str, Any]] = {"cloudtrain": {"s3_data": f"{_BASE}/{run}/config/"}}
    for level in levels(case):
        arguments |= level.arguments
        inputs |= {name: dict(channel) for name, channel in level.inputs.items()}
    if "tensorboard_output_config" in arguments:
        arguments["tensorboard_output_config"] = {"s3_output_path": arguments["output_path"]}
    torchrun = case["distribution"] == "torch_distributed"
    isolated = "enable_network_isolation" in arguments
    arguments.setdefault("image_uri", _NEWEST if torchrun else _NEWEST_WITH_SMDDP)
    if torchrun and not isolated:  # with network isolation, the estimator adds this channel itself
        inputs["code"] = {"s3_data": arguments["source_dir"]}
    if (
        case["entry"] != "task" or isolated
    ):  # a script, or a container without network, does not write to S3 itself
        arguments["checkpoint_s3_uri"] = f"{_BASE}/{run}/checkpoints"
    arguments["tags"] = [*arguments["tags"], {"Key": "cloudtrain:request", "Value": identity}]
    return arguments, inputs


def combinations(case: Case, strength: int) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield every combination of `strength` values of a case."""
    return itertools.combinations(case.items(), strength)


def cover(factors: Mapping[str, Sequence[str]], strength: int) -> list[dict[str, str]]:
    """Return cases that contain every combination of values of any `strength` factors. The result is deterministic.

    The algorithm is greedy: each case starts with the first missing combination. Every other factor takes the value
    that adds most missing combinations. Ties are decided in rotation.
    """
    missing = {
        tuple(zip(names, values, strict=True)): None  # a dict keeps the order
        for names in itertools.combinations(factors, strength)
        for values in itertools.product(*(factors[name] for name in names))
    }
    cases: list[dict[str, str]] = []
    while missing:
        chosen = dict(next(iter(missing)))
        for factor in [name for name in factors if name not in chosen]:
            turn = len(cases) % len(factors[factor])
            values = [*factors[factor][turn:], *factors[factor][:turn]]
            chosen[factor] = max(
                values, key=lambda value: _added(chosen, factor, value, factors, missing, strength)
            )
        case = {name: chosen[name] for name in factors}
        for combination in combinations(case, strength):
            missing.pop(combination, None)
        cases.append(case)
    return cases


def _added(
    chosen: Case,
    factor: str,
    value: str,
    factors: Mapping[str, Sequence[str]],
    missing: Mapping[Any, None],
    strength: int,
) -> int:
    """Return the number of missing combinations that a value of a factor adds to the chosen values."""
    others = [name for name in factors if name in chosen]
    order = list(factors)
    count = 0
    for names in itertools.combinations(others, strength - 1):
        combination = sorted(
            [*((name, chosen[name]) for name in names), (factor, value)],
            key=lambda x: order.index(x[0]),
        )
        count += tuple(combination) in missing
    return count


EBS = Level(
    {"cluster.instance_type": "ml.p3.8xlarge"},
    arguments={
        "instance_type": "ml.p3.8xlarge",
        "volume_kms_key": _KEY,
        # CUDA 13 does not support the GPUs of p3.
        "image_uri": f"{_REGISTRY}/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker",
    },
)
"""An instance type whose volume can have a key."""


def is_refused(case: Case) -> bool:
    """Return whether the plan rejects a case: a Task with network isolation, or no network where one is needed."""
    return _has_isolated_task(case) or (
        case.get("network") == "none"
        and (case.get("data") == "mounted" or case.get("image") == "private")
    )


def _has_isolated_task(case: Case) -> bool:
    return case.get("network") == "of-the-account-and-closed" and case.get("entry") == "task"


def _allowed(case: Case) -> list[Case]:
    """Return the case, or similar cases that the plan accepts."""
    if not is_refused(case):
        return [case]
    if _has_isolated_task(case):
        others: list[Case] = [{**case, "entry": "script"}, {**case, "network": "none"}]
    else:
        data, image = case["data"], case["image"]
        plain = {
            "data": "none" if data == "mounted" else data,
            "image": "default" if image == "private" else image,
        }
        others = [{**case, "network": "of-the-job"}, {**case, **plain}]
    return [allowed for other in others for allowed in _allowed(other)]


_ALL = cover({factor: tuple(values) for factor, values in FACTORS.items()}, strength=3)
CASES = list({str(case): case for each in _ALL for case in _allowed(each)}.values())
