"""Checks of the execution role (existence, trust, permissions) and of the caller's permissions."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

from cloudtrain.planning.plan import Plan
from cloudtrain.planning.service_job import ATTEMPT_ID_CHARACTERS, training_job_name
from cloudtrain.preflight.base import (
    Account,
    Check,
    CheckContext,
    Role,
    UnansweredError,
    command,
    failed,
    find,
    map_concurrently,
    passed,
    unknown,
)
from cloudtrain.support.aws_names import parse_image
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import WEIGHT_FILES
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_SERVICES = ("sagemaker.amazonaws.com", "sagemaker.amazonaws.com.cn")
_POLICY_NAME_DIGITS = 8
_ANY_INTERFACE = "eni-00000000000000000"
_ANY_OBJECT = "cloudtrain-check"
"""Object name that represents all objects below a prefix: the simulator accepts no wildcards in resources."""

_MLFLOW_ACTIONS = tuple(
    f"sagemaker-mlflow:{name}"
    for name in (
        *(
            "CreateExperiment",
            "CreateRun",
            "GetExperimentByName",
            "GetMetricHistory",
            "GetRun",
            "LogBatch",
        ),
        *("SearchRuns", "UpdateRun"),
    )
)
"""What MLflow's client needs to log a Task. An MLflow app has one action for all calls.

Sources: Service Authorization Reference, Amazon SageMaker with MLflow; SageMaker developer guide, IAM actions supported
for MLflow Apps; both 2026-11.
"""

Document = Mapping[str, Any]


def check_role(context: Account) -> Iterator[Check]:
    """Check that the role exists and that SageMaker may assume it."""
    try:
        role = context.role
    except UnansweredError:
        yield failed(
            "role",
            f"{context.role_arn} is not the ARN of a role",
            "set CLOUDTRAIN_ROLE to one such as arn:aws:iam::123456789012:role/training; "
            "list your roles: aws iam list-roles --query 'Roles[].Arn'",
        )
        raise
    if context.caller["Account"] != role.account:
        raise UnansweredError(f"needs credentials of account {role.account}")
    answer = find(("NoSuchEntity",), context.client("iam").get_role, RoleName=role.name)
    if answer is None:
        path = ("--path", f"/{role.path}") if role.path else ()
        trust = _policy_document([_trust_statement(role.account)])
        make = command(
            *(
                "aws",
                "iam",
                "create-role",
                "--role-name",
                role.name,
                *path,
                "--assume-role-policy-document",
                trust,
            )
        )
        yield failed("role", f"there is no role {role.name} in account {role.account}", make)
        raise UnansweredError("needs the role")
    yield passed("role", f"{answer['Role']['Arn']} exists")
    yield _check_trust(context, answer["Role"]["AssumeRolePolicyDocument"])


def _policy_document(statements: Iterable[Document]) -> str:
    return dump_json({"Version": "2012-10-17", "Statement": list(statements)})


def _trust_statement(account: str) -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": {"Service": _SERVICES[0]},
        "Action": "sts:AssumeRole",
        # Prevents that SageMaker uses this role for a job of another account.
        "Condition": {"StringEquals": {"aws:SourceAccount": account}},
    }


def _check_trust(context: Account, document: Document | str) -> Check:
    role = context.role
    trusts, why = evaluate_trust(
        document, job_context_keys(role.partition, role.account, context.region, context.job)
    )
    if trusts:
        return passed("trust", f"trusts {_SERVICES[0]}")
    if trusts is None:
        return unknown("trust", why)
    kept = [
        statement
        for statement in _list(_policy(document).get("Statement"))
        if not _is_about_sagemaker(statement)
    ]
    replace_policy = command(
        *("aws", "iam", "update-assume-role-policy", "--role-name", role.name),
        *("--policy-document", _policy_document([*kept, _trust_statement(role.account)])),
    )
    return failed("trust", f"the role {why}", replace_policy)


def evaluate_trust(
    document: Document | str, context_keys: Mapping[str, str]
) -> tuple[bool | None, str]:
    """Return whether a trust policy lets SageMaker assume its role (None if only AWS can decide), and why not.

    Args:
        document: The policy, as IAM sends it or decoded.
        context_keys: Values of SageMaker's call by condition key in lower case.
    """
    relevant = [
        statement
        for statement in _list(_policy(document).get("Statement"))
        if _is_about_sagemaker(statement)
    ]
    results = [
        (statement.get("Effect"), _conditions_hold(statement, context_keys))
        for statement in relevant
    ]
    if not relevant:
        return False, f"does not trust {_SERVICES[0]}, so SageMaker cannot assume it"
    if ("Deny", True) in results or not (("Allow", True) in results or ("Allow", None) in results):
        conditions = dump_json([statement.get("Condition", {}) for statement in relevant])
        return (
            False,
            f"trusts SageMaker only under conditions that this job does not satisfy: {conditions}",
        )
    if ("Allow", True) not in results or ("Deny", None) in results:
        return None, "trusts SageMaker under conditions that only AWS can evaluate"
    return True, ""


def job_context_keys(partition: str, account: str, region: str, job: str = "*") -> dict[str, str]:
    """Return the condition keys of SageMaker's call when it assumes a role for a job."""
    arn = f"arn:{partition}:sagemaker:{region}:{account}:training-job/{job}"
    return {"aws:sourceaccount": account, "aws:sourcearn": arn}


def _policy(document: Document | str) -> Document:
    # IAM sends the document URL-encoded; boto3 decodes it, other clients may not.
    policy: Document = load_json(unquote(document)) if isinstance(document, str) else document
    return policy


def _is_about_sagemaker(statement: Document) -> bool:
    principal = statement.get("Principal")
    services = (
        _list(principal.get("Service")) if isinstance(principal, Mapping) else _list(principal)
    )
    actions = [str(action).lower() for action in _list(statement.get("Action"))]
    return any(service in (*_SERVICES, "*") for service in services) and any(
        fnmatchcase("sts:assumerole", action) for action in actions
    )


def _conditions_hold(statement: Document, context_keys: Mapping[str, str]) -> bool | None:
    """Whether a statement's conditions hold; None if only AWS can evaluate one of them."""
    result: bool | None = True
    for operator, entries in statement.get("Condition", {}).items():
        kind = operator.lower().removesuffix("ifexists")
        for key, values in entries.items():
            actual = context_keys.get(key.lower())
            if actual is None or kind not in ("stringequals", "stringlike", "arnlike", "arnequals"):
                result = None
            elif not any(fnmatchcase(actual, str(value)) for value in _list(values)):
                return False
    return result


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True)
class RequiredAccess:
    """IAM actions that must be allowed on resources, perhaps by a policy of the resource instead of the role."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    is_grantable_by_resource: bool = False


@dataclass(frozen=True)
class Denial:
    """An action on a resource that a simulation denies; certain if nothing outside of the simulation can allow it."""

    action: str
    resource: str
    is_explicit: bool
    is_certain: bool


def check_permissions(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the role allows what the container and SageMaker do with it."""
    accesses = tuple(required_access(context.plan, context.role, context.region))
    entries = (context_entry("kms:GrantIsForAWSResource", "boolean", "true"),)
    yield check_role_access(context, "job", accesses, context.plan.request, entries)


def check_role_access(
    context: Account,
    what: str,
    accesses: Sequence[RequiredAccess],
    request: Document,
    entries: Sequence[Document] = (),
) -> Check:
    """Check by simulation that the role has the access that a job or an endpoint needs; `request` has its network."""
    role = context.role
    subnets = request.get("VpcConfig", {}).get("Subnets", ())[
        :1
    ]  # an interface belongs to one subnet
    arns = [role.arn("ec2", context.region, f"subnet/{name}") for name in subnets]
    subnet_entries = [context_entry("ec2:Subnet", "string", arn) for arn in arns]
    denials = simulate_policy(context, context.role_arn, accesses, (*entries, *subnet_entries))
    count = sum(len(access.actions) * len(access.resources) for access in accesses)
    return check_denials(
        "permissions",
        f"the role allows all {count} actions that the {what} needs",
        denials,
        role.name,
    )


def required_access(plan: Plan, role: Role, region: str) -> Iterator[RequiredAccess]:
    """Yield the access that the role needs.

    Source: SageMaker developer guide, execution roles, permissions for CreateTrainingJob, 2026-11.
    """
    request = plan.request
    sources = [channel["DataSource"].get("S3DataSource") for channel in request["InputDataConfig"]]
    inputs = [source["S3Uri"] for source in sources if source is not None]
    weights = (plan.config.train.init_from if plan.config.train is not None else None) or ""
    inputs += [uri for uri in (plan.config.checkpoint.resume, weights) if uri.startswith("s3://")]
    outputs = [request["OutputDataConfig"]["S3OutputPath"], plan.locations.checkpoints]
    outputs += [
        uri
        for uri in (plan.config.checkpoint.uri,)
        if uri.startswith("s3://") and uri not in outputs
    ]
    if plan.locations.code not in inputs:
        inputs.append(plan.locations.code)  # AWS's toolkit downloads it with the role
    buckets = sorted({split_uri(uri).bucket for uri in (*inputs, *outputs)})
    arns = tuple(f"arn:{role.partition}:s3:::{bucket}" for bucket in buckets)
    read = objects(role, (*inputs, plan.locations.checkpoints))
    yield RequiredAccess(("s3:ListBucket",), arns, is_grantable_by_resource=True)
    yield RequiredAccess(("s3:GetObject",), read, is_grantable_by_resource=True)
    yield RequiredAccess(("s3:PutObject",), objects(role, outputs), is_grantable_by_resource=True)
    # AWS Batch chooses the job's name; only its prefix is known.
    job = (
        plan.run if plan.queue is None else training_job_name(plan.run, "0" * ATTEMPT_ID_CHARACTERS)
    )
    yield log_access(role, region, f"TrainingJobs:log-stream:{job}/algo-1")
    yield from image_access(plan.image, role)
    if "RemoteDebugConfig" in request:
        # Source: SageMaker developer guide, access a training container through AWS Systems Manager, 2026-11.
        channels = [
            f"ssmmessages:{verb}{kind}Channel"
            for verb in ("Create", "Open")
            for kind in ("Control", "Data")
        ]
        yield RequiredAccess(tuple(channels), ("*",))
    yield from network_access(request, role, region)
    yield from _key_access(request, role, region)


def check_mlflow(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the role may track a run on the SageMaker MLflow resource of the plan."""
    arn = str(context.plan.request["MlflowConfig"]["MlflowResourceArn"])
    actions = ("sagemaker:CallMlflowAppApi",) if ":mlflow-app/" in arn else _MLFLOW_ACTIONS
    denials = simulate_policy(context, context.role_arn, (RequiredAccess(actions, (arn,)),))
    yield check_denials("mlflow", f"the role may track runs on {arn}", denials, context.role.name)


def objects(role: Role, uris: Sequence[str]) -> tuple[str, ...]:
    """Return the ARNs of objects, or of an object below a prefix."""
    places = sorted({f"{place.bucket}/{place.key}".rstrip("/") for place in map(split_uri, uris)})
    return tuple(
        f"arn:{role.partition}:s3:::{place}"
        + ("" if place.endswith((".gz", *WEIGHT_FILES)) else f"/{_ANY_OBJECT}")
        for place in places
    )


def log_access(role: Role, region: str, stream: str) -> RequiredAccess:
    """Return the access to a log stream, which is named with its group below /aws/sagemaker/."""
    arn = role.arn("logs", region, f"log-group:/aws/sagemaker/{stream}")
    return RequiredAccess(("logs:CreateLogStream", "logs:PutLogEvents"), (arn,))


def image_access(uri: str, role: Role) -> Iterator[RequiredAccess]:
    """Yield the access to a container's image; none if it is in no registry of AWS."""
    image = parse_image(uri)
    if image is None:
        return
    repository = (
        f"arn:{role.partition}:ecr:{image.region}:{image.account}:repository/{image.repository}"
    )
    pull = ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage")
    yield RequiredAccess(("ecr:GetAuthorizationToken",), ("*",))
    # Within one account the repository's own policy is sufficient.
    yield RequiredAccess(
        pull, (repository,), is_grantable_by_resource=image.account == role.account
    )


def network_access(request: Document, role: Role, region: str) -> Iterator[RequiredAccess]:
    """Yield the access to a VPC's network interfaces; none without a VPC."""
    if "VpcConfig" not in request:
        return
    subnets = tuple(
        role.arn("ec2", region, f"subnet/{name}") for name in request["VpcConfig"]["Subnets"]
    )
    interface = role.arn("ec2", region, f"network-interface/{_ANY_INTERFACE}")
    described = ("NetworkInterfaces", "Vpcs", "DhcpOptions", "Subnets", "SecurityGroups")
    managed = (
        "CreateNetworkInterfacePermission",
        "DeleteNetworkInterface",
        "DeleteNetworkInterfacePermission",
    )
    yield RequiredAccess(tuple(f"ec2:Describe{what}" for what in described), ("*",))
    yield RequiredAccess(("ec2:CreateNetworkInterface",), subnets)
    yield RequiredAccess(tuple(f"ec2:{what}" for what in managed), (interface,))


def _key_access(request: Document, role: Role, region: str) -> Iterator[RequiredAccess]:
    """Yield the access to a KMS key: a grant for the volumes, and the encryption of the outputs."""
    key = str(
        request["OutputDataConfig"].get("KmsKeyId")
        or request["ResourceConfig"].get("VolumeKmsKeyId")
        or ""
    )
    if not key or "alias/" in key:
        return  # policies cannot name an alias as a resource
    arn = key if key.startswith("arn:") else role.arn("kms", region, f"key/{key}")
    actions = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey")
    yield RequiredAccess(actions, (arn,), is_grantable_by_resource=True)


def context_entry(name: str, kind: str, *values: object) -> Document:
    """Return an entry of a simulation's context."""
    return {
        "ContextKeyName": name,
        "ContextKeyValues": [str(value) for value in values],
        "ContextKeyType": kind,
    }


def simulate_policy(
    context: Account,
    principal: str,
    accesses: Sequence[RequiredAccess],
    entries: Sequence[Document] = (),
) -> list[Denial]:
    """Return what IAM's policy simulator denies a principal."""

    def simulate(access: RequiredAccess) -> list[Denial]:
        pages = (
            context.client("iam")
            .get_paginator("simulate_principal_policy")
            .paginate(
                PolicySourceArn=principal,
                ActionNames=list(access.actions),
                ResourceArns=list(access.resources),
                ContextEntries=list(entries),
            )
        )
        return [
            denial
            for page in pages
            for result in page["EvaluationResults"]
            for denial in _denials(result, access)
        ]

    denials = [denial for found in map_concurrently(simulate, accesses) for denial in found]
    # Denials of S3 actions are certain if the bucket has no policy, which could allow them.
    arns = {
        denial.resource.partition("/")[0] for denial in denials if denial.action.startswith("s3:")
    }
    without = {arn for arn in arns if not _has_policy(context, arn.rpartition(":")[2])}
    return [
        replace(each, is_certain=True) if each.resource.partition("/")[0] in without else each
        for each in denials
    ]


def _denials(result: Document, access: RequiredAccess) -> Iterator[Denial]:
    """Yield the denials of one simulation result, one for each resource if it lists them."""
    for entry in result.get("ResourceSpecificResults") or [result]:
        decision = entry.get("EvalResourceDecision") or entry.get("EvalDecision")
        if decision == "allowed":
            continue
        is_explicit = decision == "explicitDeny"
        has_missing_keys = bool(
            entry.get("MissingContextValues") or result.get("MissingContextValues")
        )
        yield Denial(
            str(result["EvalActionName"]),
            str(entry.get("EvalResourceName") or "*"),
            is_explicit,
            is_certain=not has_missing_keys
            and (is_explicit or not access.is_grantable_by_resource),
        )


def _has_policy(context: Account, bucket: str) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    with contextlib.suppress(BotoCoreError, ClientError):  # unknown, so no denial is certain
        return (
            find(("NoSuchBucketPolicy",), context.client("s3").get_bucket_policy, Bucket=bucket)
            is not None
        )
    return True


def check_denials(
    name: str, detail_if_allowed: str, denials: Sequence[Denial], role_name: str | None
) -> Check:
    """Return the check for the denials of a simulation."""
    if not denials:
        return passed(name, detail_if_allowed)
    certain = [denial for denial in denials if denial.is_certain]
    reported = certain or denials
    detail = "not allowed: " + "; ".join(
        f"{denial.action} on {denial.resource}" for denial in reported
    )
    explicit = [denial.action for denial in reported if denial.is_explicit]
    fix = (
        f"remove the Deny statement for {', '.join(explicit)}"
        if explicit
        else _grant_command(reported, role_name)
    )
    if certain:
        return failed(name, detail, fix)
    return unknown(
        name, f"{detail}; a policy of the resource or a condition may still allow it", fix
    )


def _grant_command(denials: Sequence[Denial], role_name: str | None) -> str:
    by_resource: dict[str, set[str]] = {}
    for denial in denials:
        resource = denial.resource.replace(_ANY_OBJECT, "*").replace(_ANY_INTERFACE, "*")
        by_resource.setdefault(resource, set()).add(denial.action)
    document = _policy_document(
        {"Effect": "Allow", "Action": sorted(actions), "Resource": resource}
        for resource, actions in sorted(by_resource.items())
    )
    if role_name is None:
        return f"grant the credentials these permissions: {document}"
    digest = hashlib.sha256(document.encode()).hexdigest()[:_POLICY_NAME_DIGITS]
    return command(
        *("aws", "iam", "put-role-policy", "--role-name", role_name),
        *("--policy-name", f"cloudtrain-{digest}", "--policy-document", document),
    )


def check_caller(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the caller may create the job, pass the role and upload the code."""
    role, queue, request = context.role, context.plan.queue, context.plan.request
    job = role.arn("sagemaker", context.region, f"training-job/{context.plan.run}")
    create = RequiredAccess(("sagemaker:CreateTrainingJob", "sagemaker:AddTags"), (job,))
    if queue is not None:  # AWS Batch creates the job with its own role
        name = str(queue["jobQueue"])
        arn = name if ":" in name else role.arn("batch", context.region, f"job-queue/{name}")
        create = RequiredAccess(("batch:SubmitServiceJob",), (arn,))
    # Source: Service Authorization Reference, Amazon SageMaker AI, condition keys of CreateTrainingJob, 2026-11.
    resources, encrypted = (
        request["ResourceConfig"],
        str(bool(request.get("EnableInterContainerTrafficEncryption"))),
    )
    seconds = request["StoppingCondition"]["MaxRuntimeInSeconds"]
    entries = (
        *request_entries("CreateTrainingJob", context.instance_types, request),
        *kms_key_entries("OutputKmsKey", request["OutputDataConfig"].get("KmsKeyId")),
        *kms_key_entries("VolumeKmsKey", resources.get("VolumeKmsKeyId")),
        context_entry("sagemaker:MaxRuntimeInSeconds", "numeric", seconds),
        context_entry("sagemaker:InterContainerTrafficEncryption", "boolean", encrypted.lower()),
    )
    yield check_caller_access(
        context, "job", [create], ("code", context.plan.locations.code), entries
    )


def check_caller_access(
    context: Account,
    what: str,
    creates: Sequence[RequiredAccess],
    upload: tuple[str, str],
    entries: Sequence[Document],
) -> Check:
    """Check by simulation that the caller may create a job or an endpoint, pass the role and upload something.

    Args:
        context: The account.
        what: What is created.
        creates: The access that the requests need.
        upload: Noun and URI of the upload.
        entries: Context entries of the requests.
    """
    arn, role = context.caller["Arn"], context.role
    if arn.endswith(":root"):
        return passed("caller", "the root user has all permissions")
    noun, uri = upload
    write = RequiredAccess(
        ("s3:PutObject", "s3:GetObject"), objects(role, (uri,)), is_grantable_by_resource=True
    )
    accesses = (*creates, RequiredAccess(("iam:PassRole",), (context.role_arn,)), write)
    given = [entry for entry in entries if entry["ContextKeyValues"]]
    denials = simulate_policy(context, _policy_source(context, arn), accesses, given)
    return check_denials(
        "caller", f"may create the {what}, pass the role and upload the {noun}", denials, None
    )


def request_entries(
    operation: str, instance_types: Sequence[str], request: Document
) -> tuple[Document, ...]:
    """Return the context entries of a request, for policies with conditions on it; `request` has its network."""
    network = request.get("VpcConfig", {})
    return (
        context_entry("iam:PassedToService", "string", _SERVICES[0]),
        context_entry("sagemaker:TaggingAction", "string", operation),
        context_entry("sagemaker:InstanceTypes", "stringList", *instance_types),
        context_entry("sagemaker:VpcSubnets", "stringList", *network.get("Subnets", ())),
        context_entry(
            "sagemaker:VpcSecurityGroupIds", "stringList", *network.get("SecurityGroupIds", ())
        ),
    )


def kms_key_entries(name: str, key: str | None) -> tuple[Document, ...]:
    """Return the context entries of a KMS key: the current condition key and the old one, which some policies use."""
    return (
        ()
        if key is None
        else tuple(context_entry(f"sagemaker:{name}{end}", "string", key) for end in ("Arn", ""))
    )


def _policy_source(context: Account, arn: str) -> str:
    """Return the user or role whose policies apply to a caller; IAM cannot simulate a session's ARN.

    Raises:
        UnansweredError: The caller is a federated user, whose policies IAM cannot simulate.
    """
    kind, _, rest = arn.rpartition(":")[2].partition("/")
    if kind == "assumed-role":
        # The session's ARN lacks the role's path.
        return str(context.client("iam").get_role(RoleName=rest.partition("/")[0])["Role"]["Arn"])
    if kind != "user":
        raise UnansweredError(f"IAM cannot simulate the policies of {arn}")
    return arn.replace(":sts:", ":iam:", 1)
