"""Checks of the execution role (existence, trust, permissions) and of the caller's permissions."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

from cloudtrain.preflight.base import (
    Account,
    CheckContext,
    UnansweredError,
    command,
    find,
    map_concurrently,
)
from cloudtrain.preflight.rights import (
    ANY_INTERFACE,
    ANY_NAME,
    RequiredAccess,
    accesses,
    any_capacity,
    caller_values,
    condition_entries,
    context_entry,
    role_values,
    shell_values,
)
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_SERVICES = ("sagemaker.amazonaws.com", "sagemaker.amazonaws.com.cn")
_POLICY_NAME_DIGITS = 8
_ROOT = ":root"
_SHELL_TARGET = "ssm:resourceTag/aws:ssmmessages:target-id"

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
    if not isinstance(document, str):
        return document
    policy: Document = load_json(unquote(document))
    return policy


def _is_about_sagemaker(statement: Document) -> bool:
    principal = statement.get("Principal")
    # A principal that is no mapping is "*": everyone.
    if isinstance(principal, Mapping):
        principal = principal.get("Service")
    services = _list(principal)
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
class Denial:
    """An action on a resource that a simulation denies; certain if nothing outside of the simulation can allow it."""

    action: str
    resource: str
    is_explicit: bool
    is_certain: bool


def check_permissions(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the role allows what the container and SageMaker do with it."""
    values = role_values(context.plan, context.role, context.region)
    needed = tuple(accesses("permissions", values, context.role))
    entries = (context_entry("kms:GrantIsForAWSResource", "boolean", "true"),)
    yield check_role_access(context, "job", needed, context.plan.request, entries)


def check_role_access(
    context: Account,
    what: str,
    needed: Sequence[RequiredAccess],
    request: Document,
    entries: Sequence[Document] = (),
) -> Check:
    """Check by simulation that the role has the access that a job or an endpoint needs; `request` has its network."""
    role = context.role
    # An interface belongs to one subnet.
    subnets = request.get("VpcConfig", {}).get("Subnets", ())[:1]
    arns = [role.arn("ec2", context.region, f"subnet/{name}") for name in subnets]
    subnet_entries = [context_entry("ec2:Subnet", "string", arn) for arn in arns]
    denials = simulate_policy(context, context.role_arn, needed, (*entries, *subnet_entries))
    count = sum(len(access.actions) * len(access.resources) for access in needed)
    return check_denials(
        "permissions",
        f"the role allows all {count} actions that the {what} needs",
        denials,
        role.name,
    )


def check_mlflow(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the role may track a run on the SageMaker MLflow resource of the plan."""
    arn = str(context.plan.request["MlflowConfig"]["MlflowResourceArn"])
    kind = "mlflow_app" if ":mlflow-app/" in arn else "mlflow_server"
    needed = tuple(accesses("mlflow", {kind: (arn,)}, context.role))
    denials = simulate_policy(context, context.role_arn, needed)
    yield check_denials("mlflow", f"the role may track runs on {arn}", denials, context.role.name)


def simulate_policy(
    context: Account,
    principal: str,
    needed: Sequence[RequiredAccess],
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

    denials = [denial for found in map_concurrently(simulate, needed) for denial in found]
    # Denials of S3 actions are certain if the bucket has no policy, which could allow them.
    arns = {
        denial.resource.partition("/")[0] for denial in denials if denial.action.startswith("s3:")
    }
    without = {arn for arn in arns if not _has_policy(context, arn.rpartition(":")[2])}
    found = []
    for denial in denials:
        is_certain = denial.resource.partition("/")[0] in without
        found.append(replace(denial, is_certain=True) if is_certain else denial)
    return found


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

    # Without an answer it is unknown, so no denial is certain.
    with contextlib.suppress(BotoCoreError, ClientError):
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
    fix = _grant_command(reported, role_name)
    if explicit:
        # No grant has an effect against a Deny.
        fix = f"remove the Deny statement for {', '.join(explicit)}"
    if certain:
        return failed(name, detail, fix)
    return unknown(
        name, f"{detail}; a policy of the resource or a condition may still allow it", fix
    )


def _grant_command(denials: Sequence[Denial], role_name: str | None) -> str:
    by_resource: dict[str, set[str]] = {}
    for denial in denials:
        resource = denial.resource.replace(ANY_NAME, "*").replace(ANY_INTERFACE, "*")
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
    """Check by simulation that the caller may create the job, pass the role and upload the code.

    With a training plan AWS also decides about the plan and its reserved capacities, so all of them are asked for.
    """
    role = context.role
    plan = context.plan
    reserved = [
        arn
        for choice in context.choices
        if choice.training_plan is not None
        for arn in _reserved_capacities(context, choice.training_plan, choice.instance_type)
    ]
    values = caller_values(plan, role, context.role_arn, context.region, reserved)
    needed = tuple(accesses("caller", values, role))
    entries = (*operation_entries("CreateTrainingJob"), *condition_entries(plan.request))
    yield check_caller_access(context, "job", "code", needed, entries)


def _reserved_capacities(
    context: CheckContext, training_plan: str, instance_type: str
) -> tuple[str, ...]:
    """Return the ARNs of a training plan's reserved capacities; one that represents them if AWS does not list them."""
    from botocore.exceptions import BotoCoreError, ClientError

    found: Document | None = None
    # The check of the training plan reports it.
    with contextlib.suppress(BotoCoreError, ClientError):
        found = context.training_plan(training_plan)
    listed = tuple(
        str(each["ReservedCapacityArn"])
        for each in (found or {}).get("ReservedCapacitySummaries", ())
        if each.get("InstanceType") == instance_type and each.get("ReservedCapacityArn")
    )
    return listed or (any_capacity(training_plan),)


def check_caller_access(
    context: Account,
    what: str,
    upload: str,
    needed: Sequence[RequiredAccess],
    entries: Sequence[Document],
) -> Check:
    """Check by simulation that the caller may create a job or an endpoint, pass the role and upload something.

    Args:
        context: The account.
        what: What is created.
        upload: What is uploaded.
        needed: The access that the requests need.
        entries: Context entries of the requests.
    """
    arn = context.caller["Arn"]
    if arn.endswith(_ROOT):
        return passed("caller", "the root user has all permissions")
    given = [entry for entry in entries if entry["ContextKeyValues"]]
    denials = simulate_policy(context, _policy_source(context, arn), needed, given)
    return check_denials(
        "caller", f"may create the {what}, pass the role and upload the {upload}", denials, None
    )


def check_shell(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the caller may open a shell in a container. The job runs without it.

    Somebody else may open the shell, so a denial is a warning.
    """
    name = "remote debugging"
    arn = context.caller["Arn"]
    target = f"sagemaker-training-job:{context.plan.run}_algo-1"
    allowed = f"may open a shell: aws ssm start-session --target {target}"
    if arn.endswith(_ROOT):
        yield passed(name, allowed)
        return
    needed = tuple(accesses(name, shell_values(context.plan), context.role))
    entries = (context_entry(_SHELL_TARGET, "string", target),)
    denials = simulate_policy(context, _policy_source(context, arn), needed, entries)
    if not denials:
        yield passed(name, allowed)
        return
    actions = ", ".join(dict.fromkeys(denial.action for denial in denials))
    detail = f"cluster.remote_debug: these credentials lack {actions}, so they cannot open a shell"
    fix = "to grant it: allow_remote_debugging of infra/, or a policy of your own"
    yield passed(name, detail, warning=f"{detail}; {fix}")


def operation_entries(operation: str) -> tuple[Document, ...]:
    """Return the context entries of an operation that passes the role and tags what it creates."""
    return (
        context_entry("iam:PassedToService", "string", _SERVICES[0]),
        context_entry("sagemaker:TaggingAction", "string", operation),
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
