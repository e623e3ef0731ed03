"""Checks before a deploy: the role, the caller's and the role's permissions, and the quota of endpoint instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.preflight import account, quota, rights, role
from cloudtrain.preflight.base import Account, CheckGroup, map_concurrently
from cloudtrain.settings.settings import Settings
from cloudtrain.support.checks import Check, failed, passed
from cloudtrain.support.s3_uri import split_uri

if TYPE_CHECKING:
    from boto3.session import Session
    from types_boto3_sagemaker import SageMakerClient

_MAX_ENDPOINTS = 50
"""Most endpoints whose instances are counted; with more endpoints the count is a lower bound."""
_UNUSED = ("Failed", "Deleting")
_KEY = "sagemaker:VolumeKmsKey"

Request = Mapping[str, Any]


class EndpointContext(Account):
    """The account and the requests that checks of an endpoint need.

    Args:
        requests: Requests by operation: CreateModel, CreateEndpointConfig, CreateEndpoint, and those of its scaling.
        settings: Complete settings of the account.
        session: A boto3 session with credentials.
    """

    def __init__(
        self, requests: Mapping[str, Request], settings: Settings, session: Session
    ) -> None:
        super().__init__(settings, session)
        self.requests = requests

    @property
    def role_arn(self) -> str:
        """ARN of the model's execution role."""
        return str(self.requests["CreateModel"]["ExecutionRoleArn"])

    @property
    def name(self) -> str:
        """Name of the endpoint."""
        return str(self.requests["CreateEndpoint"]["EndpointName"])

    @property
    def variant(self) -> Request:
        """The only production variant."""
        found: Request = self.requests["CreateEndpointConfig"]["ProductionVariants"][0]
        return found

    @property
    def package(self) -> str:
        """Uri of the model's package."""
        container = self.requests["CreateModel"]["PrimaryContainer"]
        return str(
            container.get("ModelDataUrl") or container["ModelDataSource"]["S3DataSource"]["S3Uri"]
        )


def endpoint_check_groups(context: EndpointContext) -> Iterator[CheckGroup]:
    """Yield the checks of an endpoint, in the order in which they are reported."""
    yield CheckGroup(("identity",), account.check_identity)
    yield CheckGroup(("caller",), _check_caller)
    yield CheckGroup(("role", "trust"), role.check_role)
    yield CheckGroup(("permissions",), _check_permissions)
    if "InstanceType" in context.variant:
        yield CheckGroup(("quota",), _check_quota)


def _check_permissions(context: EndpointContext) -> Iterator[Check]:
    """Check by simulation that the role allows what SageMaker does with it for an endpoint.

    Source: SageMaker developer guide, execution roles, permissions for CreateModel, 2026-11.
    """
    own = context.role
    region = context.region
    model = context.requests["CreateModel"]
    values = {
        "bucket": (f"arn:{own.partition}:s3:::{split_uri(context.package).bucket}",),
        "input": rights.objects(own, (context.package,)),
        "log_stream": rights.log_stream(own, region, f"Endpoints/{context.name}:log-stream:x"),
        **rights.image_values(str(model["PrimaryContainer"]["Image"]), own),
        **rights.network_values(model, own, region),
    }
    needed = tuple(rights.accesses("permissions", values, own))
    yield role.check_role_access(context, "endpoint", needed, model)


def _check_caller(context: EndpointContext) -> Iterator[Check]:
    """Check by simulation that the caller may create the endpoint, pass the role and upload the package."""
    its_role = context.role
    region = context.region
    kinds = (("Model", "model"), ("EndpointConfig", "endpoint-config"), ("Endpoint", "endpoint"))
    names = {kind: str(context.requests[f"Create{kind}"][f"{kind}Name"]) for kind, _ in kinds}
    needed = [
        rights.RequiredAccess(
            (f"sagemaker:Create{kind}", "sagemaker:AddTags"),
            (its_role.arn("sagemaker", region, f"{part}/{names[kind]}"),),
        )
        for kind, part in kinds
    ]
    # AWS decides about the configuration, too.
    config = its_role.arn("sagemaker", region, f"endpoint-config/{names['EndpointConfig']}")
    needed.append(rights.RequiredAccess(("sagemaker:CreateEndpoint",), (config,)))
    if "RegisterScalableTarget" in context.requests:
        target = its_role.arn("application-autoscaling", region, "scalable-target/*")
        actions = tuple(
            f"application-autoscaling:{name}"
            for name in ("RegisterScalableTarget", "PutScalingPolicy")
        )
        needed.append(rights.RequiredAccess(actions, (target,)))
    values = {
        "role": (context.role_arn,),
        "upload": rights.objects(its_role, (context.package,)),
    }
    needed += rights.accesses("caller", values, its_role)
    yield role.check_caller_access(context, "endpoint", "package", needed, _entries(context))


def _entries(context: EndpointContext) -> tuple[Request, ...]:
    """Return the context entries of the requests.

    Source: Service Authorization Reference, SageMaker AI, CreateModel and CreateEndpointConfig, 2026-11.
    """
    network = context.requests["CreateModel"].get("VpcConfig", {})
    values = {
        "InstanceTypes": rights.member_values(context.variant, "InstanceType"),
        "VpcSubnets": network.get("Subnets", ()),
        "VpcSecurityGroupIds": network.get("SecurityGroupIds", ()),
    }
    key = context.requests["CreateEndpointConfig"].get("KmsKeyId")
    # Some policies use the older name.
    keys = () if key is None else (_KEY, f"{_KEY}Arn")
    return (
        *role.operation_entries("CreateEndpoint"),
        *(
            rights.context_entry(f"sagemaker:{name}", "stringList", *each)
            for name, each in values.items()
        ),
        *(rights.context_entry(name, "string", key) for name in keys),
        rights.context_entry("application-autoscaling:service-namespace", "string", "sagemaker"),
    )


def _check_quota(context: EndpointContext) -> Iterator[Check]:
    """Check the quota of endpoint instances of the type, with those in use."""
    kind = context.variant["InstanceType"]
    wanted = context.variant["InitialInstanceCount"]
    scaling = context.requests.get("RegisterScalableTarget", {})
    most = int(scaling.get("MaxCapacity", wanted))
    # As in CreateEndpoint's ResourceLimitExceeded errors.
    name = f"{kind} for endpoint usage"
    quotas, used = quota.look_up(context, {name}, lambda: _count_use(context, kind))
    found = quotas.get(name)
    if found is None:
        yield quota.unlisted(context, name)
        return
    counted = "the instances in use could not be counted"
    if used is not None:
        counted = f"{used} in use"
    detail = f"{name}: {found.value} in {context.region}, {counted}, the endpoint needs {wanted}"
    if (used or 0) + wanted > found.value:
        yield failed("quota", detail, quota.increase(context, found, (used or 0) + most))
    elif (used or 0) + most > found.value:
        warning = f"it cannot scale to {most} instances: {quota.increase(context, found, (used or 0) + most)}"
        yield passed("quota", detail, warning=warning)
    else:
        yield passed("quota", detail)


def _count_use(context: EndpointContext, kind: str) -> int:
    """Return the instances of a type that other endpoints use."""
    client = context.client("sagemaker")
    page = client.list_endpoints(
        SortBy="CreationTime", SortOrder="Descending", MaxResults=_MAX_ENDPOINTS
    )
    names = [
        each["EndpointName"] for each in page["Endpoints"] if each["EndpointStatus"] not in _UNUSED
    ]

    def count(name: str) -> int:
        return sum(
            number
            for variant, number in list_variants(client, name)
            if variant.get("InstanceType") == kind
        )

    return sum(map_concurrently(count, (name for name in names if name != context.name)))


def list_variants(client: SageMakerClient, name: str) -> list[tuple[Request, int]]:
    """Return the variants of an endpoint's configuration, each with its number of instances."""
    described = client.describe_endpoint(EndpointName=name)
    config = client.describe_endpoint_config(EndpointConfigName=described["EndpointConfigName"])
    found = described.get("ProductionVariants", ())
    counts = {each["VariantName"]: each.get("CurrentInstanceCount") for each in found}
    return [
        (each, int(counts.get(each["VariantName"]) or each.get("InitialInstanceCount", 0)))
        for each in config["ProductionVariants"]
    ]
