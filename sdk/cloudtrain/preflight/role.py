"""Checks of the execution role (existence, trust, permissions) and of the caller's permissions."""

from __future__ import annotations

import hashlib
import json
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
    error_code,
    failed,
    map_concurrently,
    passed,
    unknown,
)
from cloudtrain.support.aws_names import parse_image
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import WEIGHT_FILES
from cloudtrain_runtime.contract.strict_json import dump_json

_SERVICES = ("sagemaker.amazonaws.com", "sagemaker.amazonaws.com.cn")
_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_POLICY_NAME_DIGITS = 8
_ANY_INTERFACE = "eni-00000000000000000"
_ANY_OBJECT = "cloudtrain-check"
"""Object name that represents all objects below a prefix: the simulator accepts no wildcards in resources."""

_MLFLOW_ACTIONS = tuple(
    f"sagemaker-mlflow:{name}"
    for name in (
        *("CreateExperiment", "CreateRun", "GetExperimentByName", "GetMetricHistory", "GetRun", "LogBatch"),
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
    from botocore.exceptions import ClientError

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
    try:
        found = context.client("iam").get_role(RoleName=role.name)["Role"]
    except ClientError as error:
        if error_code(error) != "NoSuchEntity":
            raise
        path = ("--path", f"/{role.path}") if role.path else ()
        trust = _policy_document([_trust_statement(role.account)])
        make = command(
            *("aws", "iam", "create-role", "--role-name", role.name, *path, "--assume-role-policy-document", trust)
        )
        yield failed("role", f"there is no role {role.name} in account {role.account}", make)
        raise UnansweredError("needs the role") from None
    yield passed("role", f"{found['Arn']} exists")
    yield _check_trust(context, found["AssumeRolePolicyDocument"])


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
    trusts, why = evaluate_trust(document, job_context_keys(role.partition, role.account, context.region, context.job))
    if trusts:
        return passed("trust", f"trusts {_SERVICES[0]}")
    if trusts is None:
        return unknown("trust", why)
    kept = [statement for statement in _list(_policy(document).get("Statement")) if not _is_about_sagemaker(statement)]
    replace_policy = command(
        *("aws", "iam", "update-assume-role-policy", "--role-name", role.name),
        *("--policy-document", _policy_document([*kept, _trust_statement(role.account)])),
    )
    return failed("trust", f"the role {why}", replace_policy)


def evaluate_trust(document: Document | str, context_keys: Mapping[str, str]) -> tuple[bool | None, str]:
    """Return whether a trust policy lets SageMaker assume its role (None if only AWS can decide), and why not.

    Args:
        document: The policy, as IAM sends it or decoded.
        context_keys: Values of SageMaker's call by condition key in lower case.
    """
    relevant = [statement for statement in _list(_policy(document).get("Statement")) if _is_about_sagemaker(statement)]
    results = [(statement.get("Effect"), _conditions_hold(statement, context_keys)) for statement in relevant]
    if not relevant:
        return False, f"does not trust {_SERVICES[0]}, so SageMaker cannot assume it"
    if ("Deny", True) in results or not (("Allow", True) in results or ("Allow", None) in results):
        conditions = dump_json([statement.get("Condition", {}) for statement in relevant])
        return False, f"trusts SageMaker only under conditions that this job does not satisfy: {conditions}"
    if ("Allow", True) not in results or ("Deny", None) in results:
        return None, "trusts SageMaker under conditions that only AWS can evaluate"
    return True, ""


def job_context_keys(partition: str, account: str, region: str, job: str = "*") -> dict[str, str]:
    """Return the condition keys of SageMaker's call when it assumes a role for a job."""
    arn = f"arn:{partition}:sagemaker:{region}:{account}:training-job/{job}"
    return {"aws:sourceaccount": account, "aws:sourcearn": arn}


def _policy(document: Document | str) -> Document:
    # IAM sends the document URL-encoded; boto3 decodes it, other clients may not.
    policy: Document = json.loads(unquote(document)) if isinstance(document, str) else document
    return policy


def _is_about_sagemaker(statement: Document) -> bool:
    principal = statement.get("Principal")
    services = _list(principal.get("Service")) if isinstance(principal, Mapping) else _list(principal)
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
    role, request = context.role, context.plan.request
    accesses = tuple(required_access(context.plan, role, context.region))
    subnet = f"arn:{role.partition}:ec2:{context.region}:{role.account}:subnet"
    subnets = request.get("VpcConfig", {}).get("Subnets", ())[:1]  # an interface belongs to one subnet
    entries = [context_entry("kms:GrantIsForAWSResource", "boolean", "true")]
    entries += [context_entry("ec2:Subnet", "string", f"{subnet}/{name}") for name in subnets]
    denials = simulate_policy(context, context.role_arn, accesses, entries)
    count = sum(len(access.actions) * len(access.resources) for access in accesses)
    yield check_denials("permissions", f"the role allows all {count} actions that the job needs", denials, role.name)


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
    outputs += [uri for uri in (plan.config.checkpoint.uri,) if uri.startswith("s3://") and uri not in outputs]
    if plan.locations.code not in inputs:
        inputs.append(plan.locations.code)  # AWS's toolkit downloads it with the role
    buckets = sorted({split_uri(uri).bucket for uri in (*inputs, *outputs)})
    arns = tuple(f"arn:{role.partition}:s3:::{bucket}" for bucket in buckets)
    read = objects(role, (*inputs, plan.locations.checkpoints))
    yield RequiredAccess(("s3:ListBucket",), arns, is_grantable_by_resource=True)
    yield RequiredAccess(("s3:GetObject",), read, is_grantable_by_resource=True)
    yield RequiredAccess(("s3:PutObject",), objects(role, outputs), is_grantable_by_resource=True)
    # AWS Batch chooses the job's name; only its prefix is known.
    job = plan.run if plan.queue is None else training_job_name(plan.run, "0" * ATTEMPT_ID_CHARACTERS)
    logs = f"arn:{role.partition}:logs:{region}:{role.account}:log-group:{_LOG_GROUP}:log-stream:{job}/algo-1"
    yield RequiredAccess(("logs:CreateLogStream", "logs:PutLogEvents"), (logs,))
    yield from image_access(plan.image, role)
    if "RemoteDebugConfig" in request:
        # Source: SageMaker developer guide, access a training container through AWS Systems Manager, 2026-11.
        channels = [f"ssmmessages:{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data")]
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
        f"arn:{role.partition}:s3:::{place}" + ("" if place.endswith((".gz", *WEIGHT_FILES)) else f"/{_ANY_OBJECT}")
        for place in places
    )


def image_access(uri: str, role: Role) -> Iterator[RequiredAccess]:
    """Yield the access to a container's image; none if it is in no registry of AWS."""
    image = parse_image(uri)
    if image is None:
        return
    repository = f"arn:{role.partition}:ecr:{image.region}:{image.account}:repository/{image.repository}"
    pull = ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage")
    yield RequiredAccess(("ecr:GetAuthorizationToken",), ("*",))
    # Within one account the repository's own policy is sufficient.
    yield RequiredAccess(pull, (repository,), is_grantable_by_resource=image.account == role.account)


def network_access(request: Document, role: Role, region: str) -> Iterator[RequiredAccess]:
    """Yield the access to a VPC's network interfaces; none without a VPC."""
    if "VpcConfig" not in request:
        return
    base = f"arn:{role.partition}:ec2:{region}:{role.account}"
    subnets = tuple(f"{base}:subnet/{name}" for name in request["VpcConfig"]["Subnets"])
    described = ("NetworkInterfaces", "Vpcs", "DhcpOptions", "Subnets", "SecurityGroups")
    managed = ("CreateNetworkInterfacePermission", "DeleteNetworkInterface", "DeleteNetworkInterfacePermission")
    yield RequiredAccess(tuple(f"ec2:Describe{what}" for what in described), ("*",))
    yield RequiredAccess(("ec2:CreateNetworkInterface",), subnets)
    yield RequiredAccess(tuple(f"ec2:{what}" for what in managed), (f"{base}:network-interface/{_ANY_INTERFACE}",))


def _key_access(request: Document, role: Role, region: str) -> Iterator[RequiredAccess]:
    """Yield the access to a KMS key: a grant for the volumes, and the encryption of the outputs."""
    key = str(request["OutputDataConfig"].get("KmsKeyId") or request["ResourceConfig"].get("VolumeKmsKeyId") or "")
    if not key or "alias/" in key:
        return  # policies cannot name an alias as a resource
    arn = key if key.startswith("arn:") else f"arn:{role.partition}:kms:{region}:{role.account}:key/{key}"
    actions = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey")
    yield RequiredAccess(actions, (arn,), is_grantable_by_resource=True)


def context_entry(name: str, kind: str, *values: object) -> Document:
    """Return an entry of a simulation's context."""
    return {"ContextKeyName": name, "ContextKeyValues": [str(value) for value in values], "ContextKeyType": kind}


def simulate_policy(
    context: Account, principal: str, accesses: Sequence[RequiredAccess], entries: Sequence[Document] = ()
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
        return [denial for page in pages for result in page["EvaluationResults"] for denial in _denials(result, access)]

    denials = [denial for found in map_concurrently(simulate, accesses) for denial in found]
    # Denials of S3 actions are certain if the bucket has no policy, which could allow them.
    arns = {denial.resource.partition("/")[0] for denial in denials if denial.action.startswith("s3:")}
    without = {arn for arn in arns if not _has_policy(context, arn.rpartition(":")[2])}
    return [replace(each, is_certain=True) if each.resource.partition("/")[0] in without else each for each in denials]


def _denials(result: Document, access: RequiredAccess) -> Iterator[Denial]:
    """Yield the denials of one simulation result, one for each resource if it lists them."""
    for entry in result.get("ResourceSpecificResults") or [result]:
        decision = entry.get("EvalResourceDecision") or entry.get("EvalDecision")
        if decision == "allowed":
            continue
        is_explicit = decision == "explicitDeny"
        has_missing_keys = bool(entry.get("MissingContextValues") or result.get("MissingContextValues"))
        yield Denial(
            str(result["EvalActionName"]),
            str(entry.get("EvalResourceName") or "*"),
            is_explicit,
            is_certain=not has_missing_keys and (is_explicit or not access.is_grantable_by_resource),
        )


def _has_policy(context: Account, bucket: str) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        context.client("s3").get_bucket_policy(Bucket=bucket)
    except ClientError as error:
        return error_code(error) != "NoSuchBucketPolicy"
    except BotoCoreError:
        return True  # unknown, so no denial is certain
    return True


def check_denials(name: str, detail_if_allowed: str, denials: Sequence[Denial], role_name: str | None) -> Check:
    """Return the check for the denials of a simulation."""
    if not denials:
        return passed(name, detail_if_allowed)
    certain = [denial for denial in denials if denial.is_certain]
    reported = certain or denials
    detail = "not allowed: " + "; ".join(f"{denial.action} on {denial.resource}" for denial in reported)
    explicit = [denial.action for denial in reported if denial.is_explicit]
    fix = f"remove the Deny statement for {', '.join(explicit)}" if explicit else _grant_command(reported, role_name)
    if certain:
        return failed(name, detail, fix)
    return unknown(name, f"{detail}; a policy of the resource or a condition may still allow it", fix)


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
    role = context.role
    arn = context.caller["Arn"]
    if arn.endswith(":root"):
        yield passed("caller", "the root user has all permissions")
        return
    base = f"arn:{role.partition}"
    job = f"{base}:sagemaker:{context.region}:{role.account}:training-job/{context.plan.run}"
    queue = context.plan.queue
    create = RequiredAccess(("sagemaker:CreateTrainingJob", "sagemaker:AddTags"), (job,))
    if queue is not None:  # AWS Batch creates the job with its own role
        name = str(queue["jobQueue"])
        arn_of_queue = name if ":" in name else f"{base}:batch:{context.region}:{role.account}:job-queue/{name}"
        create = RequiredAccess(("batch:SubmitServiceJob",), (arn_of_queue,))
    code = objects(role, (context.plan.locations.code,))
    upload = RequiredAccess(("s3:PutObject", "s3:GetObject"), code, is_grantable_by_resource=True)
    accesses = (create, RequiredAccess(("iam:PassRole",), (context.role_arn,)), upload)
    denials = simulate_policy(context, policy_source(context, arn), accesses, _caller_context(context))
    yield check_denials("caller", "may create the job, pass the role and upload the code", denials, None)


def _caller_context(context: CheckContext) -> tuple[Document, ...]:
    """Return the context entries of CreateTrainingJob, for policies with conditions on the request.

    Source: Service Authorization Reference, Amazon SageMaker AI, condition keys of CreateTrainingJob, 2026-11.
    """
    request = context.plan.request
    network, output, resources = (request.get(name, {}) for name in ("VpcConfig", "OutputDataConfig", "ResourceConfig"))
    encrypted = str(bool(request.get("EnableInterContainerTrafficEncryption"))).lower()
    entries = (
        context_entry("iam:PassedToService", "string", _SERVICES[0]),
        context_entry("sagemaker:TaggingAction", "string", "CreateTrainingJob"),
        context_entry("sagemaker:InstanceTypes", "stringList", *context.instance_types),
        context_entry("sagemaker:VpcSubnets", "stringList", *network.get("Subnets", ())),
        context_entry("sagemaker:VpcSecurityGroupIds", "stringList", *network.get("SecurityGroupIds", ())),
        *kms_key_entries("OutputKmsKey", output.get("KmsKeyId")),
        *kms_key_entries("VolumeKmsKey", resources.get("VolumeKmsKeyId")),
        context_entry("sagemaker:MaxRuntimeInSeconds", "numeric", request["StoppingCondition"]["MaxRuntimeInSeconds"]),
        context_entry("sagemaker:InterContainerTrafficEncryption", "boolean", encrypted),
    )
    return tuple(entry for entry in entries if entry["ContextKeyValues"])


def kms_key_entries(name: str, key: str | None) -> tuple[Document, ...]:
    """Return the context entries of a KMS key: the current condition key and the old one, which some policies use."""
    return () if key is None else tuple(context_entry(f"sagemaker:{name}{end}", "string", key) for end in ("Arn", ""))


def policy_source(context: Account, arn: str) -> str:
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
