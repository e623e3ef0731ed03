"""Checks before a deploy: the role, the caller's and the role's permissions, and the quota of endpoint instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.preflight import account, quota, role
from cloudtrain.preflight.base import Account, Check, CheckGroup, failed, map_concurrently, passed, unknown
from cloudtrain.settings.settings import Settings
from cloudtrain.support.s3_uri import split_uri

_LOG_GROUP = "/aws/sagemaker/Endpoints"
_MAX_ENDPOINTS = 50
"""Most endpoints whose instances are counted; with more endpoints the count is a lower bound."""
_UNUSED = ("Failed", "Deleting")

Request = Mapping[str, Any]


class EndpointContext(Account):
    """The account and the requests that checks of an endpoint need.

    Args:
        requests: Requests by operation: CreateModel, CreateEndpointConfig, CreateEndpoint, and those of its scaling.
        settings: Complete settings of the account.
        session: A boto3 session with credentials.
    """

    def __init__(self, requests: Mapping[str, Request], settings: Settings, session: Any) -> None:
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
        return str(container.get("ModelDataUrl") or container["ModelDataSource"]["S3DataSource"]["S3Uri"])

    @property
    def most_instances(self) -> int:
        """The number of instances up to which the endpoint scales."""
        scaling = self.requests.get("RegisterScalableTarget", {})
        return int(scaling.get("MaxCapacity", self.variant.get("InitialInstanceCount", 0)))


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
    its_role, model = context.role, context.requests["CreateModel"]
    base, bucket = f"arn:{its_role.partition}", split_uri(context.package).bucket
    logs = f"{base}:logs:{context.region}:{its_role.account}:log-group:{_LOG_GROUP}/{context.name}:log-stream:x"
    accesses = [
        role.RequiredAccess(("s3:ListBucket",), (f"{base}:s3:::{bucket}",), is_grantable_by_resource=True),
        role.RequiredAccess(
            ("s3:GetObject",), role.objects(its_role, (context.package,)), is_grantable_by_resource=True
        ),
        role.RequiredAccess(("logs:CreateLogStream", "logs:PutLogEvents"), (logs,)),
        *role.image_access(str(model["PrimaryContainer"]["Image"]), its_role),
        *role.network_access(model, its_role, context.region),
    ]
    subnet = f"{base}:ec2:{context.region}:{its_role.account}:subnet"
    subnets = model.get("VpcConfig", {}).get("Subnets", ())[:1]  # an interface belongs to one subnet
    entries = [role.context_entry("ec2:Subnet", "string", f"{subnet}/{name}") for name in subnets]
    denials = role.simulate_policy(context, context.role_arn, accesses, entries)
    count = sum(len(access.actions) * len(access.resources) for access in accesses)
    allowed = f"the role allows all {count} actions that the endpoint needs"
    yield role.check_denials("permissions", allowed, denials, its_role.name)


def _check_caller(context: EndpointContext) -> Iterator[Check]:
    """Check by simulation that the caller may create the endpoint, pass the role and upload the package."""
    its_role, arn = context.role, context.caller["Arn"]
    if arn.endswith(":root"):
        yield passed("caller", "the root user has all permissions")
        return
    base = f"arn:{its_role.partition}:sagemaker:{context.region}:{its_role.account}"
    kinds = (("Model", "model"), ("EndpointConfig", "endpoint-config"), ("Endpoint", "endpoint"))
    names = {kind: str(context.requests[f"Create{kind}"][f"{kind}Name"]) for kind, _ in kinds}
    accesses = [
        role.RequiredAccess((f"sagemaker:Create{kind}", "sagemaker:AddTags"), (f"{base}:{part}/{names[kind]}",))
        for kind, part in kinds
    ]
    upload = role.objects(its_role, (context.package,))
    accesses += [
        role.RequiredAccess(("iam:PassRole",), (context.role_arn,)),
        role.RequiredAccess(("s3:PutObject", "s3:GetObject"), upload, is_grantable_by_resource=True),
    ]
    if "RegisterScalableTarget" in context.requests:
        target = f"{base.replace(':sagemaker:', ':application-autoscaling:')}:scalable-target/*"
        actions = tuple(f"application-autoscaling:{name}" for name in ("RegisterScalableTarget", "PutScalingPolicy"))
        accesses.append(role.RequiredAccess(actions, (target,)))
    source = role.policy_source(context, arn)
    denials = role.simulate_policy(context, source, accesses, _caller_entries(context))
    yield role.check_denials("caller", "may create the endpoint, pass the role and upload the package", denials, None)


def _caller_entries(context: EndpointContext) -> list[Request]:
    """Return the context entries of the requests, for policies with conditions on them.

    Source: Service Authorization Reference, Amazon SageMaker AI, CreateModel and CreateEndpointConfig, 2026-11.
    """
    network = context.requests["CreateModel"].get("VpcConfig", {})
    types = [context.variant["InstanceType"]] if "InstanceType" in context.variant else []
    entries = (
        role.context_entry("iam:PassedToService", "string", "sagemaker.amazonaws.com"),
        role.context_entry("sagemaker:TaggingAction", "string", "CreateEndpoint"),
        role.context_entry("application-autoscaling:service-namespace", "string", "sagemaker"),
        role.context_entry("sagemaker:InstanceTypes", "stringList", *types),
        role.context_entry("sagemaker:VpcSubnets", "stringList", *network.get("Subnets", ())),
        role.context_entry("sagemaker:VpcSecurityGroupIds", "stringList", *network.get("SecurityGroupIds", ())),
        *role.kms_key_entries("VolumeKmsKey", context.requests["CreateEndpointConfig"].get("KmsKeyId")),
    )
    return [entry for entry in entries if entry["ContextKeyValues"]]


def _check_quota(context: EndpointContext) -> Iterator[Check]:
    """Check the quota of endpoint instances of the type, with those in use."""
    kind, wanted, most = (
        context.variant["InstanceType"],
        context.variant["InitialInstanceCount"],
        context.most_instances,
    )
    name = f"{kind} for endpoint usage"  # as in CreateEndpoint's ResourceLimitExceeded errors
    quotas, used = quota.look_up(context, {name}, lambda: _count_use(context, kind))
    found = quotas.get(name)
    if found is None:
        console = f"Service Quotas console, {context.region}, Amazon SageMaker AI: search for {name!r}"
        yield unknown("quota", f"Service Quotas has no quota {name!r} in {context.region}", console)
        return
    counted = "the instances in use could not be counted" if used is None else f"{used} in use"
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
    page = client.list_endpoints(SortBy="CreationTime", SortOrder="Descending", MaxResults=_MAX_ENDPOINTS)
    names = [each["EndpointName"] for each in page["Endpoints"] if each["EndpointStatus"] not in _UNUSED]

    def count(name: str) -> int:
        described = client.describe_endpoint(EndpointName=name)
        config = client.describe_endpoint_config(EndpointConfigName=described["EndpointConfigName"])
        counts = {each["VariantName"]: each.get("CurrentInstanceCount") for each in described["ProductionVariants"]}
        return sum(
            int(counts.get(each["VariantName"]) or each.get("InitialInstanceCount", 0))
            for each in config["ProductionVariants"]
            if each.get("InstanceType") == kind
        )

    return sum(map_concurrently(count, (name for name in names if name != context.name)))
