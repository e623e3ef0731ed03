"""What a job needs to be allowed: the rights of the catalog, with the resources and condition keys of its request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.catalog.permissions import conditions, rights
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.service_job import ATTEMPT_ID_CHARACTERS, training_job_name
from cloudtrain.preflight.base import Role
from cloudtrain.support.aws_names import parse_arn, parse_image
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import WEIGHT_FILES

ANY_INTERFACE = "eni-00000000000000000"
ANY_NAME = "cloudtrain-check"
"""Name that represents all objects below a prefix, or all resources of a kind: the simulator accepts no wildcards in
resources."""

_ANY_CAPACITY = f":reserved-capacity/{ANY_NAME}"
_REQUEST_TAG = "aws:RequestTag/${TagKey}"
_EVERYTHING = ("*",)
_OUTPUTS = (
    "OutputDataConfig.S3OutputPath",
    "TensorBoardOutputConfig.S3OutputPath",
    "DebugHookConfig.S3OutputPath",
    "ProfilerConfig.S3OutputPath",
)

Document = Mapping[str, Any]
Values = Mapping[str, tuple[str, ...]]
"""ARNs by the names that the catalog's rights have for them. A right without ARNs is not needed."""


@dataclass(frozen=True)
class RequiredAccess:
    """IAM actions that must be allowed on resources, perhaps by a policy of the resource instead of the role."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    is_grantable_by_resource: bool = False


def accesses(check: str, values: Values, role: Role) -> Iterator[RequiredAccess]:
    """Yield the access that a check asks for.

    Args:
        check: Name of the check, as the rights have it.
        values: ARNs by name.
        role: The execution role, for the account whose resources' own policies are sufficient.
    """
    for right in rights():
        if right.check != check:
            continue
        arns = [arn for name in right.resources.values() for arn in values.get(name, ())]
        own: dict[bool, list[str]] = {}
        for arn in arns:
            is_grantable = right.by_resource and _is_own(arn, role)
            own.setdefault(is_grantable or arn.endswith(_ANY_CAPACITY), []).append(arn)
        for is_grantable, group in own.items():
            yield RequiredAccess(right.actions, tuple(group), is_grantable)


def _is_own(arn: str, role: Role) -> bool:
    """Whether a resource's own policy is sufficient: it is in the role's account, or its ARN names no account."""
    parts = parse_arn(arn)
    return parts is None or parts.account in ("", role.account)


def caller_values(
    plan: Plan, role: Role, role_arn: str, region: str, reserved: Sequence[str]
) -> Values:
    """Return the ARNs of what the caller creates and uses.

    Args:
        plan: The plan.
        role: Parts of the execution role's ARN.
        role_arn: Its ARN.
        region: The job's region.
        reserved: ARNs of the reserved capacities of the job's training plans.
    """
    both = {"role": (role_arn,), "upload": objects(role, (plan.locations.code,))}
    # AWS Batch creates the job with its own role.
    if plan.queue is not None:
        return {**both, **_queue_values(plan.queue, role, region)}
    resources = plan.request["ResourceConfig"]
    plans = (
        *member_values(resources, "TrainingPlanArn"),
        *member_values(resources, "InstancePreferences.TrainingPlanArns"),
    )
    return {
        **both,
        "job": (role.arn("sagemaker", region, f"training-job/{plan.run}"),),
        "training_plan": tuple(dict.fromkeys(plans)),
        "reserved_capacity": tuple(dict.fromkeys(reserved)),
    }


def any_capacity(training_plan: str) -> str:
    """Return the ARN that represents the reserved capacities of a training plan."""
    return f"{training_plan.rpartition(':')[0]}{_ANY_CAPACITY}"


def _queue_values(queue: Document, role: Role, region: str) -> dict[str, tuple[str, ...]]:
    name = str(queue["jobQueue"])
    arn = name if ":" in name else role.arn("batch", region, f"job-queue/{name}")
    share = queue.get("quotaShareName")
    return {
        "queue": (arn,),
        # AWS chooses the id.
        "service_job": (role.arn("batch", region, f"service-job/{ANY_NAME}"),),
        "quota_share": (f"{arn}/quota-share/{share}",) if share else (),
    }


def shell_values(plan: Plan) -> Values:
    """Return the resource of a shell in the containers: none unless the job allows it."""
    return {"shell": _EVERYTHING if allows_shell(plan) else ()}


def allows_shell(plan: Plan) -> bool:
    """Return whether a plan's job allows a shell in its containers."""
    return bool(plan.request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"))


def role_values(plan: Plan, role: Role, region: str) -> Values:
    """Return the ARNs of what the container and SageMaker use with the role."""
    request = plan.request
    inputs = member_values(request, "InputDataConfig.DataSource.S3DataSource.S3Uri")
    weights = (plan.config.train.init_from if plan.config.train is not None else None) or ""
    saved = (plan.config.checkpoint.resume, weights)
    # AWS's toolkit downloads the code with the role.
    inputs += [uri for uri in saved if uri.startswith("s3://")] + [plan.locations.code]
    outputs = [uri for member in _OUTPUTS for uri in member_values(request, member)]
    outputs.append(plan.locations.checkpoints)
    outputs += [uri for uri in (plan.config.checkpoint.uri,) if uri.startswith("s3://")]
    buckets = sorted({split_uri(uri).bucket for uri in (*inputs, *outputs)})
    job = plan.run
    if plan.queue is not None:
        # AWS Batch chooses the job's name; only its prefix is known.
        job = training_job_name(plan.run, "0" * ATTEMPT_ID_CHARACTERS)
    login = (
        "TrainingImageConfig.TrainingRepositoryAuthConfig.TrainingRepositoryCredentialsProviderArn"
    )
    return {
        "bucket": tuple(f"arn:{role.partition}:s3:::{bucket}" for bucket in buckets),
        "input": objects(role, (*inputs, plan.locations.checkpoints)),
        "output": objects(role, outputs),
        "log_stream": log_stream(role, region, f"TrainingJobs:log-stream:{job}/algo-1"),
        "registry_function": tuple(member_values(request["AlgorithmSpecification"], login)),
        "key": _key(request, role, region),
        **shell_values(plan),
        **image_values(plan.image, role),
        **network_values(request, role, region),
    }


def objects(role: Role, uris: Sequence[str]) -> tuple[str, ...]:
    """Return the ARNs of objects, or of an object below a prefix."""
    places = sorted({f"{place.bucket}/{place.key}".rstrip("/") for place in map(split_uri, uris)})
    return tuple(
        f"arn:{role.partition}:s3:::{place}"
        + ("" if place.endswith((".gz", *WEIGHT_FILES)) else f"/{ANY_NAME}")
        for place in places
    )


def log_stream(role: Role, region: str, stream: str) -> tuple[str, ...]:
    """Return the ARN of a log stream, which is named with its group below /aws/sagemaker/."""
    return (role.arn("logs", region, f"log-group:/aws/sagemaker/{stream}"),)


def image_values(uri: str, role: Role) -> Values:
    """Return the ARNs for a container's image; none if it is in no registry of AWS."""
    image = parse_image(uri)
    if image is None:
        return {}
    place = f"ecr:{image.region}:{image.account}"
    repository = f"arn:{role.partition}:{place}:repository/{image.repository}"
    return {"registry": _EVERYTHING, "image": (repository,)}


def network_values(request: Document, role: Role, region: str) -> Values:
    """Return the ARNs for a VPC's network interfaces; none without a VPC."""
    network = request.get("VpcConfig")
    if network is None:
        return {}

    def arns(kind: str, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(role.arn("ec2", region, f"{kind}/{name}") for name in names)

    return {
        "network": _EVERYTHING,
        "subnet": arns("subnet", network["Subnets"]),
        "security_group": arns("security-group", network.get("SecurityGroupIds", ())),
        "interface": arns("network-interface", (ANY_INTERFACE,)),
    }


def _key(request: Document, role: Role, region: str) -> tuple[str, ...]:
    """Return the ARN of a KMS key: it encrypts the volumes, by a grant, and the outputs."""
    key = str(
        request["OutputDataConfig"].get("KmsKeyId")
        or request["ResourceConfig"].get("VolumeKmsKeyId")
        or ""
    )
    if not key or "alias/" in key:
        # Policies cannot name an alias as a resource.
        return ()
    if key.startswith("arn:"):
        return (key,)
    return (role.arn("kms", region, f"key/{key}"),)


def condition_entries(request: Document) -> Iterator[Document]:
    """Yield the context entries of a CreateTrainingJob document, for policies with conditions on it.

    A member that the request lacks has no entry: IAM's simulator then reports that the key is missing, and a denial is
    not certain.
    """
    for key, condition in conditions().items():
        found = [value for member in condition.members for value in member_values(request, member)]
        if key == _REQUEST_TAG:
            for tag in found:
                name = f"{key.partition('/')[0]}/{tag['Key']}"
                yield context_entry(name, condition.type, tag["Value"])
            continue
        values = list(map(_text, found)) or [condition.default]
        if not any(values):
            continue
        is_list = condition.type == "string" and len(values) > 1
        kind = "stringList" if is_list else condition.type
        yield context_entry(key, kind, *values)
        if condition.older:
            yield context_entry(condition.older, kind, *values)


def context_entry(name: str, kind: str, *values: object) -> Document:
    """Return an entry of a simulation's context."""
    return {
        "ContextKeyName": name,
        "ContextKeyValues": [str(value) for value in values],
        "ContextKeyType": kind,
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def member_values(value: Any, member: str) -> list[Any]:
    """Return the values of a member of a request, by its path without places in lists; empty if it is missing."""
    if isinstance(value, list | tuple):
        return [found for each in value for found in member_values(each, member)]
    if not member:
        return [value]
    name, _, below = member.partition(".")
    if not isinstance(value, Mapping) or name not in value:
        return []
    return member_values(value[name], below)
