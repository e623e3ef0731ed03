"""The execution role: it exists, trusts SageMaker, and may do what the plan needs; the caller may pass it on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    passed,
    run_concurrently,
    unknown,
)
from cloudtrain.preflight.image import parse_image
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.strict_json import dump_json

_SERVICES = ("sagemaker.amazonaws.com", "sagemaker.amazonaws.com.cn")
_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_POLICY_NAME_DIGITS = 8
_ANY_OBJECT = "cloudtrain-check"
"""Stands for any object below a prefix in a simulation, which takes no wildcards in a resource that is asked for."""

Document = Mapping[str, Any]

# ---------------------------------------------------------------- the role and whom it trusts


def check_role(context: Account) -> Iterator[Check]:
    """Check that the role exists and that SageMaker may assume it."""
    from botocore.exceptions import ClientError

    try:
        role = context.role
    except UnansweredError:
        yield failed(
            "role",
            f"{context.role_arn} is no ARN of a role",
            "set CLOUDTRAIN_ROLE to one such as arn:aws:iam::123456789012:role/training; "
            "yours are listed by: aws iam list-roles --query 'Roles[].Arn'",
        )
        raise
    if context.caller["Account"] != role.account:
        raise UnansweredError(f"needs credentials of account {role.account}")
    try:
        found = context.client("iam").get_role(RoleName=role.name)["Role"]
    except ClientError as error:
        if error_code(error) != "NoSuchEntity":
            raise
        yield failed("role", f"there is no role {role.name} in account {role.account}", _create_command(role))
        raise UnansweredError("needs the role") from None
    yield passed("role", f"{found['Arn']} exists")
    yield check_trust(context, found["AssumeRolePolicyDocument"])


def _create_command(role: Role) -> str:
    path = ("--path", f"/{role.path}") if role.path else ()
    document = dump_json({"Version": "2012-10-17", "Statement": [_trust_statement(role.account)]})
    return command(
        *("aws", "iam", "create-role", "--role-name", role.name, *path),
        *("--assume-role-policy-document", document),
    )


def _trust_statement(account: str) -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": {"Service": _SERVICES[0]},
        "Action": "sts:AssumeRole",
        # So that no other account's job can make SageMaker use this role.
        "Condition": {"StringEquals": {"aws:SourceAccount": account}},
    }


def check_trust(context: Account, document: Document | str) -> Check:
    """Check that a trust policy lets SageMaker assume the role for this job."""
    role = context.role
    trusts, why = evaluate_trust(document, job_context_keys(role.partition, role.account, context.region, context.job))
    if trusts:
        return passed("trust", f"trusts {_SERVICES[0]}")
    if trusts is None:
        return unknown("trust", why)
    return failed("trust", f"the role {why}", _trust_command(role, _policy(document)))


def evaluate_trust(document: Document | str, facts: Mapping[str, str]) -> tuple[bool | None, str]:
    """Return whether a trust policy lets SageMaker assume its role, None where only AWS can tell; and why not.

    Args:
        document: The policy, as IAM sends it or decoded.
        facts: What SageMaker's call will carry, by condition key in lower case.
    """
    about = [statement for statement in _list(_policy(document).get("Statement")) if _is_about_sagemaker(statement)]
    allowed = [_conditions_hold(statement, facts) for statement in about if statement.get("Effect") == "Allow"]
    denied = [_conditions_hold(statement, facts) for statement in about if statement.get("Effect") == "Deny"]
    if True in denied or not (True in allowed or None in allowed):
        return False, _why_untrusted(about)
    if True not in allowed or None in denied:
        return None, "trusts SageMaker under conditions that only AWS can judge"
    return True, ""


def job_context_keys(partition: str, account: str, region: str, job: str = "*") -> dict[str, str]:
    """Return what SageMaker's call carries when it assumes a role for a job of an account."""
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


def _conditions_hold(statement: Document, facts: Mapping[str, str]) -> bool | None:
    """Whether a statement's conditions hold: None when one is of a kind that only AWS can judge."""
    verdict: bool | None = True
    for operator, entries in statement.get("Condition", {}).items():
        kind = operator.lower().removesuffix("ifexists")
        for key, values in entries.items():
            fact = facts.get(key.lower())
            if fact is None or kind not in ("stringequals", "stringlike", "arnlike", "arnequals"):
                verdict = None
            elif not any(fnmatchcase(fact, str(value)) for value in _list(values)):
                return False
    return verdict


def _why_untrusted(about: Sequence[Document]) -> str:
    if not about:
        return f"does not trust {_SERVICES[0]}, so SageMaker cannot assume it"
    conditions = dump_json([statement.get("Condition", {}) for statement in about])
    return f"trusts SageMaker only under conditions that this job does not meet: {conditions}"


def _trust_command(role: Role, policy: Document) -> str:
    kept = [statement for statement in _list(policy.get("Statement")) if not _is_about_sagemaker(statement)]
    document = {"Version": "2012-10-17", "Statement": [*kept, _trust_statement(role.account)]}
    return command(
        *("aws", "iam", "update-assume-role-policy", "--role-name", role.name),
        *("--policy-document", dump_json(document)),
    )


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


# ---------------------------------------------------------------- what the role may do


@dataclass(frozen=True)
class RequiredAccess:
    """Actions that must be allowed on resources. `elsewhere` tells whether a policy of the resource may allow them."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    elsewhere: bool = False


@dataclass(frozen=True)
class Denial:
    """One action that a simulation does not allow. `certain` is false when something outside of it may."""

    action: str
    resource: str
    explicit: bool
    certain: bool


def check_permissions(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the role may do what the container and SageMaker do in its name."""
    role = context.role
    needs = required_access(context.plan, role, context.region)
    denials = simulate_policy(
        context, context.role_arn, needs, _facts_of_container(context.plan.request, role, context.region)
    )
    count = sum(len(need.actions) * len(need.resources) for need in needs)
    yield check_denials("permissions", f"the role may do all {count} things that the job needs", denials, role.name)


def required_access(plan: Plan, role: Role, region: str) -> tuple[RequiredAccess, ...]:
    """Return what the role must be allowed.

    Source: SageMaker developer guide, execution roles, permissions for CreateTrainingJob, 2026-11.
    """
    request = plan.request
    inputs = [channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in request["InputDataConfig"]]
    inputs += [uri for uri in (plan.config.checkpoint.resume,) if uri.startswith("s3://")]
    outputs = [request["OutputDataConfig"]["S3OutputPath"], plan.locations.checkpoints]
    outputs += [uri for uri in (plan.config.checkpoint.uri,) if uri.startswith("s3://") and uri not in outputs]
    if plan.locations.code not in inputs:
        inputs.append(plan.locations.code)  # AWS's toolkit reads it itself
    buckets = sorted({split_uri(uri).bucket for uri in (*inputs, *outputs)})
    return (
        RequiredAccess(
            ("s3:ListBucket",), tuple(f"arn:{role.partition}:s3:::{bucket}" for bucket in buckets), elsewhere=True
        ),
        RequiredAccess(("s3:GetObject",), _objects(role, (*inputs, plan.locations.checkpoints)), elsewhere=True),
        RequiredAccess(("s3:PutObject",), _objects(role, outputs), elsewhere=True),
        RequiredAccess(("logs:CreateLogStream", "logs:PutLogEvents"), (_log_stream(plan, role, region),)),
        *_image_needs(plan, role),
        *_network_needs(request, role, region),
        *_key_needs(request, role, region),
    )


def _objects(role: Role, uris: Sequence[str]) -> tuple[str, ...]:
    places = sorted({f"{place.bucket}/{place.key}".rstrip("/") for place in map(split_uri, uris)})
    return tuple(
        f"arn:{role.partition}:s3:::{place}" + ("" if place.endswith(".gz") else f"/{_ANY_OBJECT}") for place in places
    )


def _log_stream(plan: Plan, role: Role, region: str) -> str:
    # AWS Batch names the job itself; what comes after its prefix no policy can know.
    job = plan.run if plan.queue is None else training_job_name(plan.run, "0" * ATTEMPT_ID_CHARACTERS)
    return f"arn:{role.partition}:logs:{region}:{role.account}:log-group:{_LOG_GROUP}:log-stream:{job}/algo-1"


def _image_needs(plan: Plan, role: Role) -> tuple[RequiredAccess, ...]:
    image = parse_image(plan.image)
    if image is None:
        return ()
    repository = f"arn:{role.partition}:ecr:{image.region}:{image.account}:repository/{image.repository}"
    return (
        RequiredAccess(("ecr:GetAuthorizationToken",), ("*",)),
        RequiredAccess(
            ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"),
            (repository,),
            # Within one account the repository's own policy suffices.
            elsewhere=image.account == role.account,
        ),
    )


def _network_needs(request: Document, role: Role, region: str) -> tuple[RequiredAccess, ...]:
    if "VpcConfig" not in request:
        return ()
    base = f"arn:{role.partition}:ec2:{region}:{role.account}"
    subnets = tuple(f"{base}:subnet/{name}" for name in request["VpcConfig"]["Subnets"])
    looks = ("NetworkInterfaces", "Vpcs", "DhcpOptions", "Subnets", "SecurityGroups")
    return (
        RequiredAccess(tuple(f"ec2:Describe{what}" for what in looks), ("*",)),
        RequiredAccess(("ec2:CreateNetworkInterface",), subnets),
        RequiredAccess(
            (
                *("ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface"),
                "ec2:DeleteNetworkInterfacePermission",
            ),
            (f"{base}:network-interface/eni-00000000000000000",),
        ),
    )


def _key_needs(request: Document, role: Role, region: str) -> tuple[RequiredAccess, ...]:
    """Return what a key must allow: a grant for the volumes, and the encryption of the outputs."""
    key = str(request["OutputDataConfig"].get("KmsKeyId") or request["ResourceConfig"].get("VolumeKmsKeyId") or "")
    if not key or "alias/" in key:
        return ()  # an alias is no resource of a policy
    arn = key if key.startswith("arn:") else f"arn:{role.partition}:kms:{region}:{role.account}:key/{key}"
    return (RequiredAccess(("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey"), (arn,), elsewhere=True),)


def _facts_of_container(request: Document, role: Role, region: str) -> tuple[Document, ...]:
    """Return what SageMaker's calls in the role's name carry, for the conditions of its policies."""
    subnets = request.get("VpcConfig", {}).get("Subnets", ())
    base = f"arn:{role.partition}:ec2:{region}:{role.account}:subnet"
    return (
        _fact("kms:GrantIsForAWSResource", "boolean", "true"),
        *(_fact("ec2:Subnet", "string", f"{base}/{name}") for name in subnets[:1]),  # an interface is in one
    )


def _fact(name: str, kind: str, *values: object) -> Document:
    return {"ContextKeyName": name, "ContextKeyValues": [str(value) for value in values], "ContextKeyType": kind}


def simulate_policy(
    context: CheckContext, principal: str, needs: Sequence[RequiredAccess], facts: Sequence[Document] = ()
) -> tuple[Denial, ...]:
    """Return what IAM's policy simulator does not allow a principal."""

    def ask(need: RequiredAccess) -> list[Denial]:
        pages = (
            context.client("iam")
            .get_paginator("simulate_principal_policy")
            .paginate(
                PolicySourceArn=principal,
                ActionNames=list(need.actions),
                ResourceArns=list(need.resources),
                ContextEntries=list(facts),
            )
        )
        return [denial for page in pages for result in page["EvaluationResults"] for denial in _denials(result, need)]

    answers = run_concurrently([lambda need=need: ask(need) for need in needs])  # type: ignore[misc]
    return _unless_bucket_allows(context, [denial for answer in answers for denial in answer])


def _denials(result: Document, need: RequiredAccess) -> Iterator[Denial]:
    """Yield what one result denies, resource by resource where it tells them apart."""
    for entry in result.get("ResourceSpecificResults") or [result]:
        decision = entry.get("EvalResourceDecision") or entry.get("EvalDecision")
        if decision == "allowed":
            continue
        explicit = decision == "explicitDeny"
        is_open = bool(entry.get("MissingContextValues") or result.get("MissingContextValues"))
        yield Denial(
            str(result["EvalActionName"]),
            str(entry.get("EvalResourceName") or "*"),
            explicit,
            certain=not is_open and (explicit or not need.elsewhere),
        )


def _unless_bucket_allows(context: CheckContext, denials: Sequence[Denial]) -> tuple[Denial, ...]:
    """Make a denial in S3 certain where the bucket has no policy of its own that could allow it."""
    arns = {denial.resource.partition("/")[0] for denial in denials if denial.action.startswith("s3:")}
    without = {arn for arn in arns if not _has_policy(context, arn.rpartition(":")[2])}
    return tuple(
        Denial(denial.action, denial.resource, denial.explicit, certain=True)
        if denial.resource.partition("/")[0] in without
        else denial
        for denial in denials
    )


def _has_policy(context: CheckContext, bucket: str) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        context.client("s3").get_bucket_policy(Bucket=bucket)
    except ClientError as error:
        return error_code(error) != "NoSuchBucketPolicy"
    except BotoCoreError:
        return True  # unknown, so nothing is certain
    return True


def check_denials(name: str, fine: str, denials: Sequence[Denial], role_name: str | None) -> Check:
    """Return the check that a simulation's denials make."""
    if not denials:
        return passed(name, fine)
    certain = [denial for denial in denials if denial.certain]
    told = certain or denials
    detail = "not allowed: " + "; ".join(f"{denial.action} on {denial.resource}" for denial in told)
    explicit = [denial.action for denial in told if denial.explicit]
    fix = f"remove what denies {', '.join(explicit)}" if explicit else _grant_command(told, role_name)
    if certain:
        return failed(name, detail, fix)
    return unknown(name, f"{detail}; a policy of the resource, or a condition, may still allow it", fix)


def _grant_command(denials: Sequence[Denial], role_name: str | None) -> str:
    by_resource: dict[str, list[str]] = {}
    for denial in denials:
        resource = denial.resource.replace(_ANY_OBJECT, "*").replace("eni-00000000000000000", "*")
        by_resource.setdefault(resource, []).append(denial.action)
    document = dump_json(
        {
            "Version": "2012-10-17",
            "Statement": [
                {"Effect": "Allow", "Action": sorted(set(actions)), "Resource": resource}
                for resource, actions in sorted(by_resource.items())
            ],
        }
    )
    if role_name is None:
        return f"ask for these permissions of the credentials: {document}"
    digest = hashlib.sha256(document.encode()).hexdigest()[:_POLICY_NAME_DIGITS]
    return command(
        *("aws", "iam", "put-role-policy", "--role-name", role_name),
        *("--policy-name", f"cloudtrain-{digest}", "--policy-document", document),
    )


# ---------------------------------------------------------------- what the caller may do


def check_caller(context: CheckContext) -> Iterator[Check]:
    """Check by simulation that the caller may create the job, pass the role and upload the code."""
    role = context.role
    arn = context.caller["Arn"]
    if arn.endswith(":root"):
        yield passed("caller", "the root user may do everything")
        return
    base = f"arn:{role.partition}"
    job = f"{base}:sagemaker:{context.region}:{role.account}:training-job/{context.plan.run}"
    queue = context.plan.queue
    create = RequiredAccess(("sagemaker:CreateTrainingJob", "sagemaker:AddTags"), (job,))
    if queue is not None:  # AWS Batch creates the job with a role of its own
        name = str(queue["jobQueue"])
        arn_of_queue = name if ":" in name else f"{base}:batch:{context.region}:{role.account}:job-queue/{name}"
        create = RequiredAccess(("batch:SubmitServiceJob",), (arn_of_queue,))
    needs = (
        create,
        RequiredAccess(("iam:PassRole",), (context.role_arn,)),
        RequiredAccess(
            ("s3:PutObject", "s3:GetObject"), _objects(role, (context.plan.locations.code,)), elsewhere=True
        ),
    )
    denials = simulate_policy(context, _policy_source(context, arn), needs, _facts_of_caller(context))
    yield check_denials("caller", "may create the job, pass the role and upload the code", denials, None)


def _facts_of_caller(context: CheckContext) -> tuple[Document, ...]:
    """Return what CreateTrainingJob tells IAM of the request, so that policies which bound it can be judged.

    Source: Service Authorization Reference, Amazon SageMaker AI, condition keys of CreateTrainingJob, 2026-11.
    """
    request = context.plan.request
    network, output, resources = (request.get(name, {}) for name in ("VpcConfig", "OutputDataConfig", "ResourceConfig"))
    encrypted = str(bool(request.get("EnableInterContainerTrafficEncryption"))).lower()
    facts = (
        _fact("iam:PassedToService", "string", _SERVICES[0]),
        _fact("sagemaker:TaggingAction", "string", "CreateTrainingJob"),
        _fact("sagemaker:InstanceTypes", "stringList", *context.instance_types),
        _fact("sagemaker:VpcSubnets", "stringList", *network.get("Subnets", ())),
        _fact("sagemaker:VpcSecurityGroupIds", "stringList", *network.get("SecurityGroupIds", ())),
        *_keys("OutputKmsKey", output.get("KmsKeyId")),
        *_keys("VolumeKmsKey", resources.get("VolumeKmsKeyId")),
        _fact("sagemaker:MaxRuntimeInSeconds", "numeric", request["StoppingCondition"]["MaxRuntimeInSeconds"]),
        _fact("sagemaker:InterContainerTrafficEncryption", "boolean", encrypted),
    )
    return tuple(fact for fact in facts if fact["ContextKeyValues"])


def _keys(name: str, key: str | None) -> tuple[Document, ...]:
    """Return a key of KMS under the name that AWS compares, and under the one of old that some policies still have."""
    return () if key is None else tuple(_fact(f"sagemaker:{name}{end}", "string", key) for end in ("Arn", ""))


def _policy_source(context: CheckContext, arn: str) -> str:
    """Return the user or role whose policies bind a caller; a session's own ARN is none that IAM simulates.

    Raises:
        UnansweredError: a federated user, whose policies IAM cannot look up.
    """
    kind, _, rest = arn.rpartition(":")[2].partition("/")
    if kind == "assumed-role":
        # The session's ARN leaves out the role's path.
        return str(context.client("iam").get_role(RoleName=rest.partition("/")[0])["Role"]["Arn"])
    if kind != "user":
        raise UnansweredError(f"IAM cannot simulate the policies of {arn}")
    return arn.replace(":sts:", ":iam:", 1)
