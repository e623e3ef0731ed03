"""The IAM actions that each recorded call needs.

Sources: AWS's Service Authorization Reference, the API reference of S3, and SageMaker's developer guide, "Execution
role permissions", for the calls that SageMaker makes with a job's role (2026-11).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from support.applied_policies import AppliedPolicies, fill
from support.aws_calls import Call
from support.iam_policy import Document, Request, as_list

_S3 = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "GetBucketLocation": "s3:GetBucketLocation",
    "GetBucketPolicy": "s3:GetBucketPolicy",
    "GetObject": "s3:GetObject",
    "HeadBucket": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
}
_KMS = {
    "CompleteMultipartUpload": ("kms:Decrypt",),
    "CreateMultipartUpload": ("kms:GenerateDataKey",),
    "GetObject": ("kms:Decrypt",),
    "PutObject": ("kms:GenerateDataKey",),
    # S3 decrypts the parts of an upload to put them together (API reference of CreateMultipartUpload).
    "UploadPart": ("kms:Decrypt", "kms:GenerateDataKey"),
}
_OTHERS = {
    ("application-autoscaling", "DescribeScalableTargets"): (
        "application-autoscaling:DescribeScalableTargets",
    ),
    **{
        ("application-autoscaling", operation): (f"application-autoscaling:{operation}",)
        for operation in ("DeregisterScalableTarget", "PutScalingPolicy", "RegisterScalableTarget")
    },
    ("batch", "DescribeJobQueues"): ("batch:DescribeJobQueues",),
    ("batch", "DescribeServiceEnvironments"): ("batch:DescribeServiceEnvironments",),
    ("batch", "DescribeServiceJob"): ("batch:DescribeServiceJob",),
    ("batch", "GetJobQueueSnapshot"): ("batch:GetJobQueueSnapshot",),
    ("batch", "ListServiceJobs"): ("batch:ListServiceJobs",),
    ("batch", "TerminateServiceJob"): ("batch:TerminateServiceJob",),
    ("cloudwatch", "GetMetricStatistics"): ("cloudwatch:GetMetricStatistics",),
    ("budgets", "DescribeBudgets"): ("budgets:ViewBudget",),
    ("ec2", "DescribeNetworkInterfaces"): ("ec2:DescribeNetworkInterfaces",),
    ("ec2", "DescribeRouteTables"): ("ec2:DescribeRouteTables",),
    ("ec2", "DescribeSecurityGroups"): ("ec2:DescribeSecurityGroups",),
    ("ec2", "DescribeSubnets"): ("ec2:DescribeSubnets",),
    ("ec2", "DescribeVpcEndpoints"): ("ec2:DescribeVpcEndpoints",),
    ("ecr", "BatchGetImage"): ("ecr:BatchGetImage",),
    ("efs", "DescribeMountTargetSecurityGroups"): (
        "elasticfilesystem:DescribeMountTargetSecurityGroups",
    ),
    ("efs", "DescribeMountTargets"): ("elasticfilesystem:DescribeMountTargets",),
    ("events", "ListRuleNamesByTarget"): ("events:ListRuleNamesByTarget",),
    ("fsx", "DescribeFileSystems"): ("fsx:DescribeFileSystems",),
    ("iam", "GetRole"): ("iam:GetRole",),
    ("iam", "SimulatePrincipalPolicy"): ("iam:SimulatePrincipalPolicy",),
    ("logs", "CreateLogGroup"): ("logs:CreateLogGroup",),
    ("logs", "CreateLogStream"): ("logs:CreateLogStream",),
    ("logs", "DescribeLogStreams"): ("logs:DescribeLogStreams",),
    ("logs", "GetLogEvents"): ("logs:GetLogEvents",),
    ("logs", "PutLogEvents"): ("logs:PutLogEvents",),
    ("pricing", "GetProducts"): ("pricing:GetProducts",),
    **{
        ("sagemaker", f"{verb}{kind}"): (f"sagemaker:{verb}{kind}",)
        for verb in ("Delete", "Describe")
        for kind in ("Endpoint", "EndpointConfig", "Model")
    },
    **{
        ("sagemaker", f"List{kind}s"): (f"sagemaker:List{kind}s",)
        for kind in ("Endpoint", "EndpointConfig", "Model")
    },
    ("sagemaker-runtime", "InvokeEndpoint"): ("sagemaker:InvokeEndpoint",),
    ("sagemaker", "DescribeHyperParameterTuningJob"): (
        "sagemaker:DescribeHyperParameterTuningJob",
    ),
    ("sagemaker", "DescribeTrainingJob"): ("sagemaker:DescribeTrainingJob",),
    ("sagemaker", "DescribeTrainingPlan"): ("sagemaker:DescribeTrainingPlan",),
    ("sagemaker", "ListTags"): ("sagemaker:ListTags",),
    ("sagemaker", "ListTrainingJobs"): ("sagemaker:ListTrainingJobs",),
    ("sagemaker", "ListTrainingJobsForHyperParameterTuningJob"): (
        "sagemaker:ListTrainingJobsForHyperParameterTuningJob",
    ),
    ("sagemaker", "Search"): ("sagemaker:Search",),
    ("sagemaker", "StopHyperParameterTuningJob"): ("sagemaker:StopHyperParameterTuningJob",),
    ("sagemaker", "StopTrainingJob"): ("sagemaker:StopTrainingJob",),
    ("sagemaker", "UpdateTrainingJob"): ("sagemaker:UpdateTrainingJob",),
    ("secretsmanager", "DescribeSecret"): ("secretsmanager:DescribeSecret",),
    ("secretsmanager", "GetSecretValue"): ("secretsmanager:GetSecretValue",),
    ("service-quotas", "ListAWSDefaultServiceQuotas"): (
        "servicequotas:ListAWSDefaultServiceQuotas",
    ),
    ("service-quotas", "ListServiceQuotas"): ("servicequotas:ListServiceQuotas",),
}
NO_PERMISSION = {("sts", "GetCallerIdentity")}
"""Operations that AWS allows with any valid credentials, without a permission."""

CONFIGURE = "configure"
"""The command that reads an account once, when somebody sets cloudtrain up. No policy contains its calls."""

_CONFIGURE = {
    "ListBuckets": "s3:ListAllMyBuckets",
    "GetBucketEncryption": "s3:GetEncryptionConfiguration",
    "GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
}


def configure_actions(calls: Iterable[Call]) -> list[str]:
    """Return the actions of calls that only `cloudtrain configure` makes."""
    return [
        _CONFIGURE.get(call.operation)
        or _S3.get(call.operation)
        or f"{call.service}:{call.operation}"
        for call in sorted(calls)
        if call.by == (CONFIGURE,) and (call.service, call.operation) not in NO_PERMISSION
    ]


class UnmappedError(Exception):
    """A recorded operation that is missing in the tables of this module."""


def requests_of(
    call: Call, applied: AppliedPolicies, requests: Sequence[Document]
) -> list[Request]:
    """Return the requests that IAM decides when a call is made.

    Args:
        call: A call of the record.
        applied: Policies and names of the account.
        requests: CreateTrainingJob documents that were planned with the module's outputs as settings.

    Raises:
        UnmappedError: The operation is missing in the tables.
    """
    pair = (call.service, call.operation)
    if pair in NO_PERMISSION or call.by == (CONFIGURE,):
        return []
    if call.service == "s3":
        return _of_s3(call, applied)
    if pair in _SERVED:
        return _of_endpoint(call, applied)
    if pair in _CREATED:
        return [
            each for request in requests for each in _of_create(applied, request, *_CREATED[pair])
        ]
    if pair == ("batch", "SubmitServiceJob"):
        return _of_queue(call, applied)
    if pair not in _OTHERS:
        raise UnmappedError(str(call))
    arn = _arn(call, applied)
    context = {"aws:username": (applied.names["caller"],)}
    if call.operation in ("StopHyperParameterTuningJob", "StopTrainingJob", "UpdateTrainingJob"):
        context["aws:ResourceTag/cloudtrain:job"] = ("first",)
    if call.operation.startswith("Delete") or call.operation == "InvokeEndpoint":
        context["aws:ResourceTag/cloudtrain:run"] = (applied.names["run"],)
    if call.service == "application-autoscaling":
        context["application-autoscaling:service-namespace"] = ("sagemaker",)
    return [Request(action, arn, context) for action in _OTHERS[pair]]


def _of_s3(call: Call, applied: AppliedPolicies) -> list[Request]:
    resource = "arn:aws:s3:::" + fill(call.resource, applied)
    context = {"aws:SecureTransport": ("true",), "s3:TlsVersion": ("1.3",)}
    if call.operation in _S3:
        actions, keys = (_S3[call.operation],), _KMS.get(call.operation, ())
    else:
        raise UnmappedError(str(call))
    if call.fields:
        raise UnmappedError(f"{call}: conditions and actions for these fields")
    found = [Request(action, resource, context) for action in actions]
    via = {"kms:ViaService": (f"s3.{applied.names['region']}.amazonaws.com",)}
    encrypted_with = (
        applied.names["data-key"]
        if call.resource.startswith("{data}")
        else applied.outputs["kms_key"]
    )
    return found + [Request(key, encrypted_with, via) for key in keys]


_CREATED = {
    ("sagemaker", "CreateTrainingJob"): ("CreateTrainingJob", "training-job"),
    ("sagemaker", "CreateHyperParameterTuningJob"): (
        "CreateHyperParameterTuningJob",
        "hyper-parameter-tuning-job",
    ),
}
"""Operation and kind of resource. The definition of a tuning job's training jobs has the same fields."""


def _of_create(
    applied: AppliedPolicies, request: Document, operation: str, kind: str
) -> list[Request]:
    job = fill(f"arn:aws:sagemaker:{{region}}:{{account}}:{kind}/{{run}}", applied)
    role = str(request["RoleArn"])
    return [
        Request(f"sagemaker:{operation}", job, context_of(request)),
        Request("iam:PassRole", role, {"iam:PassedToService": ("sagemaker.amazonaws.com",)}),
        *(
            [Request("sagemaker:AddTags", job, {"sagemaker:TaggingAction": (operation,)})]
            if request.get("Tags")
            else []
        ),
    ]


_SERVED = {
    ("sagemaker", "CreateModel"): ("model",),
    ("sagemaker", "CreateEndpointConfig"): ("endpoint-config",),
    ("sagemaker", "CreateEndpoint"): ("endpoint", "endpoint-config"),
}
"""Kinds of resources on which AWS needs the action; the first is created."""


def _of_endpoint(call: Call, applied: AppliedPolicies) -> list[Request]:
    """Return the requests for a part of an endpoint, on types with and without local disks."""
    from cloudtrain.features.serving.endpoint_request import EndpointOptions, make_requests
    from cloudtrain.settings.settings import Settings

    settings = Settings(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in applied.outputs.items()
        }
    )
    kinds = _SERVED[call.service, call.operation]
    base = "arn:aws:sagemaker:{region}:{account}:"
    arns = [fill(f"{base}{kind}/{{run}}", applied) for kind in kinds]
    tagging = {"sagemaker:TaggingAction": (call.operation,)}
    found = [Request("sagemaker:AddTags", arns[0], tagging)] if "Tags" in call.fields else []
    for instance_type in ("ml.m5.xlarge", "ml.g5.xlarge"):
        options = EndpointOptions(instance_type=instance_type)
        made = make_requests(
            applied.names["run"], "s3://bucket/model.tar.gz", "0", options, settings
        )
        context = _endpoint_context(made.model, made.config)[kinds[0]]
        found += [Request(f"sagemaker:{call.operation}", arn, context) for arn in arns]
        if kinds[0] == "model":
            to_sagemaker = {"iam:PassedToService": ("sagemaker.amazonaws.com",)}
            found.append(Request("iam:PassRole", str(made.model["ExecutionRoleArn"]), to_sagemaker))
    return found


def _endpoint_context(model: Document, config: Document) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the condition keys that AWS derives from the requests, by kind of resource."""
    network, variants = model.get("VpcConfig", {}), config["ProductionVariants"]
    values = {
        "model": {
            "VpcSubnets": network.get("Subnets"),
            "VpcSecurityGroupIds": network.get("SecurityGroupIds"),
        },
        "endpoint-config": {
            "InstanceTypes": [each["InstanceType"] for each in variants if "InstanceType" in each]
            or None,
            "VolumeKmsKey": config.get("KmsKeyId"),
        },
        "endpoint": {},
    }
    return {
        kind: {
            f"sagemaker:{name}": tuple(map(_text, as_list(value)))
            for name, value in keys.items()
            if value
        }
        for kind, keys in values.items()
    }


def context_of(request: Document) -> dict[str, tuple[str, ...]]:
    """Return the condition keys that AWS derives from a CreateTrainingJob document, without those it lacks."""
    resources, network = request["ResourceConfig"], request.get("VpcConfig", {})
    output, stopping = request["OutputDataConfig"], request["StoppingCondition"]
    types = [
        resources.get("InstanceType"),
        *(each["InstanceType"] for each in resources.get("InstancePreferences", ())),
    ]
    values = {
        "InstanceTypes": [each for each in types if each],
        "VpcSubnets": network.get("Subnets"),
        "VpcSecurityGroupIds": network.get("SecurityGroupIds"),
        "OutputKmsKeyArn": output.get("KmsKeyId"),
        "VolumeKmsKeyArn": resources.get("VolumeKmsKeyId"),
        "InterContainerTrafficEncryption": request.get("EnableInterContainerTrafficEncryption"),
        "MaxRuntimeInSeconds": stopping["MaxRuntimeInSeconds"],
    }
    return {
        f"sagemaker:{name}": tuple(_text(each) for each in as_list(value))
        for name, value in values.items()
        if value is not None
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_queue(call: Call, applied: AppliedPolicies) -> list[Request]:
    base = "arn:aws:batch:{region}:{account}:"
    queue, job = (
        fill(f"{base}job-queue/{{queue}}", applied),
        fill(f"{base}service-job/{{job}}", applied),
    )
    # With a quota share, which the record does not distinguish, IAM also decides about the share.
    resources = (queue, job, f"{queue}/quota-share/vision")
    found = [Request("batch:SubmitServiceJob", resource) for resource in resources]
    if "tags" in call.fields:
        found.append(Request("batch:TagResource", job))
    to_sagemaker = {"iam:PassedToService": ("sagemaker.amazonaws.com",)}
    return [*found, Request("iam:PassRole", applied.outputs["role"], to_sagemaker)]


_PREFIXES = {"efs": "elasticfilesystem", "sagemaker-runtime": "sagemaker"}
"""Service in ARNs, where it is not that of botocore."""

_UNNAMED = {("batch", "DescribeServiceJob"), ("batch", "ListServiceJobs")}
"""Calls with a resource, whose actions support no resources in policies."""


def _arn(call: Call, applied: AppliedPolicies) -> str:
    if (call.service, call.operation) in _UNNAMED:
        return "*"
    if call.service == "logs" and "log-stream" not in call.resource:
        # The format of a log group in AWS's error messages. Policies use `:*` (CloudWatch Logs User Guide).
        return fill(f"arn:aws:logs:{{region}}:{{account}}:{call.resource}:log-stream:", applied)
    if call.resource == "*" or call.resource.startswith("{"):
        return fill(call.resource, applied)
    region = "" if call.service in ("iam", "budgets") else "{region}"
    account = "763104351884" if call.service == "ecr" else "{account}"
    service = _PREFIXES.get(call.service, call.service)
    return fill(f"arn:aws:{service}:{region}:{account}:{call.resource}", applied)
