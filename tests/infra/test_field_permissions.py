"""What `check` asks for each field of a job is allowed by the policies of infra/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.applied_policies import EXECUTION, LOOK, SUBMIT, AppliedPolicies
from support.iam_policy import Decision, Request, decide
from support.terraform import MODULE

import cloudtrain
from cloudtrain.catalog.permissions import CALLER, Right, conditions, rights
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.base import Role
from cloudtrain.preflight.rights import (
    RequiredAccess,
    accesses,
    any_capacity,
    caller_values,
    condition_entries,
    role_values,
    shell_values,
)
from cloudtrain.preflight.role import operation_entries
from cloudtrain.settings.settings import Settings

STORED = AppliedPolicies.read()
NAMES = STORED.names
HERE = f"{NAMES['region']}:{NAMES['account']}"
PLAN = f"arn:aws:sagemaker:{HERE}:training-plan/november"
APP = f"arn:aws:sagemaker:{HERE}:mlflow-app/app-ABCDEFGHIJKL"
FUNCTION = f"arn:aws:lambda:{HERE}:function:registry"
BUCKET = f"s3://{STORED.outputs['bucket']}/{STORED.outputs['prefix']}"
NETWORK = (
    f"cluster.network.subnets={list(STORED.outputs['subnets'])}".replace("'", ""),
    f"cluster.network.security_groups={list(STORED.outputs['security_groups'])}".replace("'", ""),
)
REGISTRY = (
    f"{{uri: 'registry.example.com/train:1', private_registry: {{credentials: '{FUNCTION}'}}}}"
)
MOUNT = "{fsx: fs-01234567, path: /mount/data, mount: rw}"
EFS = "{efs: fs-01234567, path: /data}"

JOBS: Mapping[str, Sequence[str]] = {
    "name": (),
    "code.directory": (),
    "code.include": (),
    "code.requirements": (),
    "code.env": (f"code.env={{TOKEN: {{secret: '{NAMES['secret']}'}}}}",),
    "cluster.instance_type": ("cluster.instance_type=ml.m5.xlarge",),
    "cluster.prefer.instance_type": ("cluster={prefer: [ml.p4d.24xlarge, ml.p4de.24xlarge]}",),
    "cluster.prefer.training_plan": (
        f"cluster={{prefer: [{{instance_type: ml.p5.48xlarge, training_plan: '{PLAN}'}}]}}",
    ),
    "cluster.training_plan": (
        f"cluster={{instance_type: ml.p5.48xlarge, training_plan: '{PLAN}'}}",
    ),
    "cluster.framework": (),
    "cluster.image.uri": (
        "cluster.image=763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.5.1-gpu-py311",
    ),
    "cluster.image.private_registry.credentials": (f"cluster.image={REGISTRY}",),
    "cluster.keep_alive": ("cluster.keep_alive=30m",),
    "cluster.queue.name": (f"cluster.queue={NAMES['queue']}",),
    "cluster.queue.quota_share": (
        f"cluster.queue={{name: {NAMES['queue']}, quota_share: vision}}",
    ),
    "cluster.remote_debug": ("cluster.remote_debug=true",),
    "cluster.network.subnets": NETWORK,
    "cluster.network.security_groups": NETWORK,
    "cluster.network.isolation": ("cluster.network.isolation=true",),
    "cluster.network.encrypt_traffic": ("cluster.network.encrypt_traffic=true",),
    "data.<name>.uri": ("data.train=s3://example-images/train/",),
    **dict.fromkeys(
        ("data.<name>.fsx", "data.<name>.path", "data.<name>.mount"), (f"data.train={MOUNT}",)
    ),
    "data.<name>.efs": (f"data.train={EFS}",),
    "checkpoint.uri": (f"checkpoint.uri={BUCKET}/shared/checkpoints",),
    "checkpoint.resume": (f"checkpoint.resume={BUCKET}/other/checkpoints/",),
    "train.init_from": (f"train={{epochs: 1, init_from: '{BUCKET}/other/checkpoints/'}}",),
    "output.uri": (f"output.uri={BUCKET}/models",),
    "limits.runtime": ("limits.runtime=2h",),
    "tags": ("tags={team: vision}",),
    "notify.sns": (f"notify={{sns: 'arn:aws:sns:{HERE}:training'}}",),
    "tracking.tensorboard": ("tracking.tensorboard=true",),
    "tracking.mlflow": (f"tracking.mlflow={APP}",),
    "tracking.wandb.mode": ("tracking.wandb.mode=offline", "metrics={loss: 'loss=([0-9.]+)'}"),
    "RoleArn": (),
    "OutputDataConfig.KmsKeyId": (),
    "ResourceConfig.VolumeKmsKeyId": ("cluster.instance_type=ml.m5.xlarge",),
    "DebugHookConfig.S3OutputPath": (
        f"request={{DebugHookConfig: {{S3OutputPath: '{BUCKET}/debug'}}}}",
    ),
    "ProfilerConfig.S3OutputPath": (
        f"request={{ProfilerConfig: {{S3OutputPath: '{BUCKET}/profile'}}}}",
    ),
}
"""Overrides of a job that sets a field which needs a right, or which sets a condition key."""

_JOB = "name: first\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge}\nlimits: {runtime: 1h}\n"


def asking(field: str) -> list[Right]:
    """Return the rights of a field for which a check asks."""
    return [right for right in rights() if right.check and field in right.fields]


@pytest.fixture
def plan(tmp_path: Path, field: str) -> Plan:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "mine.py").write_text("class Mine(Task):\n    def __init__(self): ...\n")
    (tmp_path / "job.yaml").write_text(_JOB)
    settings = Settings(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in STORED.outputs.items()
        }
    )
    if field.startswith("train."):
        text = _JOB.replace("script: train.py", 'task: "mine:Mine"')
        (tmp_path / "job.yaml").write_text(text)
    spec = cloudtrain.validate(tmp_path / "job.yaml", JOBS[field], settings=settings)
    return cloudtrain.plan(spec, settings=settings)


def asked(plan: Plan) -> Iterator[tuple[str, RequiredAccess]]:
    """Yield who needs what, as the checks of a plan ask for it."""
    arn = str(plan.request["RoleArn"])
    role = Role("aws", NAMES["account"], "", arn.rpartition("/")[2])
    region = NAMES["region"]
    server = [
        (f"mlflow_{'app' if ':mlflow-app/' in each else 'server'}", (each,))
        for each in [plan.request.get("MlflowConfig", {}).get("MlflowResourceArn")]
        if each
    ]
    secret = tuple(each.secret for each in plan.config.secrets.values())
    key = (NAMES["data-key"],) if secret else ()
    reserved = [any_capacity(PLAN)] if PLAN in str(plan.request) else []
    of_caller = caller_values(plan, role, arn, region, reserved)
    for who, check, values in (
        ("caller", "caller", of_caller),
        ("caller", "remote debugging", shell_values(plan)),
        ("role", "permissions", role_values(plan, role, region)),
        ("role", "mlflow", dict(server)),
        ("role", "secrets", {"secret": secret, "secret_key": key}),
    ):
        yield from ((who, access) for access in accesses(check, values, role))


def context_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    entries = [*operation_entries("CreateTrainingJob"), *condition_entries(plan.request)]
    given = {entry["ContextKeyName"]: tuple(entry["ContextKeyValues"]) for entry in entries}
    subnet = f"arn:aws:ec2:{HERE}:subnet/{STORED.outputs['subnets'][0]}"
    own: dict[str, tuple[str, ...]] = {
        "kms:GrantIsForAWSResource": ("true",),
        "ssm:resourceTag/aws:ssmmessages:target-id": (f"sagemaker-training-job:{plan.run}_algo-1",),
        "ec2:Subnet": (subnet,),
    }
    return {**given, **own}


@pytest.mark.parametrize("field", JOBS)
def test_infra_allows_what_check_asks(field: str, plan: Plan) -> None:
    found = list(asked(plan))
    names = {CALLER: (SUBMIT, LOOK)}
    denied = [
        f"{who}: {action} on {resource}"
        for who, access in found
        for action in access.actions
        for resource in access.resources
        if decide(
            [STORED.policies[name] for name in names.get(who, (EXECUTION,))],
            Request(action, resource, context_of(plan)),
        )
        is not Decision.ALLOWED
    ]
    assert denied == []
    given = [(who, access.actions) for who, access in found]
    missing = [right.name for right in asking(field) if (right.who, right.actions) not in given]
    assert missing == ([] if field != "tracking.mlflow" else ["mlflow server"])
    keys = {str(entry["ContextKeyName"]) for entry in condition_entries(plan.request)}
    for key, condition in conditions().items():
        if field in condition.fields:
            assert any(name == key or name.startswith(key.partition("$")[0]) for name in keys), key


def test_every_field_has_a_job() -> None:
    fields = {field for right in rights() if right.check for field in right.fields}
    fields |= {field for each in conditions().values() for field in each.fields}
    assert set(JOBS) == fields


def test_optional_rights_are_off_by_default() -> None:
    hcl2 = pytest.importorskip("hcl2")  # of the extra `all`
    text = (MODULE / "variables.tf").read_text(encoding="utf-8")
    defaults: dict[str, Any] = {
        name.strip('"'): body["default"]
        for block in hcl2.loads(text)["variable"]
        for name, body in block.items()
        if "default" in body
    }
    named = {right.variable for right in rights() if right.variable}
    assert {name: defaults[name] for name in named if defaults[name] not in ([], False)} == {}
