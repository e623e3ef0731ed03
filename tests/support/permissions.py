"""The proof that the policies of infra/ allow what cloudtrain calls, and nothing else; and its table in docs/.

    PYTHONPATH=tests python -m support.permissions --write           write docs/reference/permissions.md anew
    PYTHONPATH=tests python -m support.permissions --policies FILE   keep the policies that the tests have applied

Which action an operation needs is said by AWS's Service Authorization Reference, the API reference of S3 and, for what
SageMaker does in a job's name, SageMaker's developer guide, "Execution role permissions" (2026-11).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support.aws_calls import CLIENT, Call, read_record
from support.iam_policy import (
    Decision,
    Document,
    Grant,
    Request,
    as_list,
    decide,
    granting,
    grants,
)
from support.terraform import KEY_OF_DATA

TESTS = Path(__file__).parents[1]
POLICIES = TESTS / "infra" / "policies.json"
PAGE = TESTS.parent / "docs" / "reference" / "permissions.md"

EXECUTION, SUBMIT, LOOK = "execution", "submit", "look"
IDENTITY = (EXECUTION, SUBMIT, LOOK)
_WRITTEN_AS = {
    EXECUTION: ("aws_iam_role_policy", "execution"),
    SUBMIT: ("aws_iam_policy", "submit"),
    LOOK: ("aws_iam_policy", "look"),
    "bucket": ("aws_s3_bucket_policy", "this"),
    "key": ("aws_kms_key", "this"),
    "s3_endpoint": ("aws_vpc_endpoint", "s3"),
}
_TABLE = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Kept:
    """An applied module: its policies and what they name, with names that are the same each time.

    Attributes:
        outputs: The module's outputs.
        policies: Documents by name: those of `IDENTITY`, and those of the bucket, its key and the way to S3.
    """

    outputs: Mapping[str, Any]
    policies: Mapping[str, Document]

    @classmethod
    def read(cls, path: Path = POLICIES) -> Kept:
        """Return what the repository keeps."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, applied: Mapping[str, Any]) -> Kept:
        """Return what was applied, its random names replaced."""
        found = {(each["type"], each["name"]): each["values"] for each in applied["resources"]}
        documents = {name: json.loads(found[place]["policy"]) for name, place in _WRITTEN_AS.items() if place in found}
        text = json.dumps({"outputs": dict(applied["outputs"]), "policies": documents}, sort_keys=True)
        for drawn, fixed in _drawn(applied["outputs"]):
            text = text.replace(drawn, fixed)
        named = json.loads(text)
        return cls(outputs=named["outputs"], policies=_ordered(named["policies"]))

    def write(self, path: Path = POLICIES) -> None:
        """Keep it in the repository."""
        path.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @cached_property
    def names(self) -> Mapping[str, str]:
        """What stands for the names in braces of a record."""
        account, region = self.outputs["role"].split(":")[4], self.outputs["region"]
        base = f":{region}:{account}:"
        return {
            "bucket": self.outputs["bucket"],
            "prefix": self.outputs["prefix"],
            "run": "first-261121-120000-0a1b2c",
            "elsewhere": "shared",
            "data": "example-images/train",
            "data-bucket": "example-images",
            "data-key": f"arn:aws:kms{base}key/{KEY_OF_DATA}",
            "role": self.outputs["role"].partition(":role/")[2],
            "caller": "ada",
            "queue": "training",
            "job": "0f0f0f0f-0000-4000-8000-000000000000",
            "image": "pytorch-training",
            "secret": f"arn:aws:secretsmanager{base}secret:wandb-a1B2c3",
            "account": account,
            "region": region,
        }


def _ordered(document: Any) -> Any:
    """Return a document with the strings of each list in order: the provider sorts resources by their random names."""
    if isinstance(document, dict):
        return {name: _ordered(each) for name, each in document.items()}
    if isinstance(document, list):
        return sorted(document) if all(isinstance(each, str) for each in document) else [*map(_ordered, document)]
    return document


def _drawn(outputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield outputs["bucket"], f"{outputs['bucket'].rpartition('-')[0]}-{'0' * 16}"
    yield outputs["kms_key"].rpartition("/")[2], "00000000-0000-4000-8000-000000000000"
    for kind, names in (("subnet", outputs["subnets"]), ("sg", outputs["security_groups"])):
        for number, name in enumerate(names):
            yield name, f"{kind}-{number:017x}"


# ---------------------------------------------------------------- from calls to actions

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
    ("batch", "DescribeJobQueues"): ("batch:DescribeJobQueues",),
    ("batch", "DescribeServiceEnvironments"): ("batch:DescribeServiceEnvironments",),
    ("batch", "DescribeServiceJob"): ("batch:DescribeServiceJob",),
    ("batch", "GetJobQueueSnapshot"): ("batch:GetJobQueueSnapshot",),
    ("batch", "ListServiceJobs"): ("batch:ListServiceJobs",),
    ("batch", "TerminateServiceJob"): ("batch:TerminateServiceJob",),
    ("budgets", "DescribeBudgets"): ("budgets:ViewBudget",),
    ("ec2", "DescribeRouteTables"): ("ec2:DescribeRouteTables",),
    ("ec2", "DescribeSecurityGroups"): ("ec2:DescribeSecurityGroups",),
    ("ec2", "DescribeSubnets"): ("ec2:DescribeSubnets",),
    ("ec2", "DescribeVpcEndpoints"): ("ec2:DescribeVpcEndpoints",),
    ("ecr", "BatchGetImage"): ("ecr:BatchGetImage",),
    ("iam", "GetRole"): ("iam:GetRole",),
    ("iam", "SimulatePrincipalPolicy"): ("iam:SimulatePrincipalPolicy",),
    ("logs", "CreateLogGroup"): ("logs:CreateLogGroup",),
    ("logs", "CreateLogStream"): ("logs:CreateLogStream",),
    ("logs", "DescribeLogStreams"): ("logs:DescribeLogStreams",),
    ("logs", "GetLogEvents"): ("logs:GetLogEvents",),
    ("logs", "PutLogEvents"): ("logs:PutLogEvents",),
    ("pricing", "GetProducts"): ("pricing:GetProducts",),
    ("sagemaker", "DescribeTrainingJob"): ("sagemaker:DescribeTrainingJob",),
    ("sagemaker", "ListTags"): ("sagemaker:ListTags",),
    ("sagemaker", "ListTrainingJobs"): ("sagemaker:ListTrainingJobs",),
    ("sagemaker", "Search"): ("sagemaker:Search",),
    ("sagemaker", "StopTrainingJob"): ("sagemaker:StopTrainingJob",),
    ("sagemaker", "UpdateTrainingJob"): ("sagemaker:UpdateTrainingJob",),
    ("secretsmanager", "DescribeSecret"): ("secretsmanager:DescribeSecret",),
    ("secretsmanager", "GetSecretValue"): ("secretsmanager:GetSecretValue",),
    ("service-quotas", "ListAWSDefaultServiceQuotas"): ("servicequotas:ListAWSDefaultServiceQuotas",),
    ("service-quotas", "ListServiceQuotas"): ("servicequotas:ListServiceQuotas",),
}
NO_PERMISSION = {("sts", "GetCallerIdentity")}
"""What AWS answers to whoever has credentials, whatever a policy says."""

CONFIGURE = "configure"
"""The verb that asks an account what there is, once, for whoever sets cloudtrain up: its calls are in no policy."""

_CONFIGURE = {
    "ListBuckets": "s3:ListAllMyBuckets",
    "GetBucketEncryption": "s3:GetEncryptionConfiguration",
    "GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
}


class UnmappedError(Exception):
    """A recorded operation of which nobody has said what it needs."""


def requests_of(call: Call, kept: Kept, requests: Sequence[Document]) -> list[Request]:
    """Return what IAM is asked when a call is made.

    Args:
        call: From the record.
        kept: Gives the names.
        requests: CreateTrainingJob documents that were planned with the module's outputs as settings.

    Raises:
        UnmappedError: the operation stands in no table.
    """
    pair = (call.service, call.operation)
    if pair in NO_PERMISSION or call.by == (CONFIGURE,):
        return []
    if call.service in ("s3", "s3torchconnector"):
        return _of_s3(call, kept)
    if pair == ("sagemaker", "CreateTrainingJob"):
        return [each for request in requests for each in _of_create(kept, request)]
    if pair == ("batch", "SubmitServiceJob"):
        return _of_queue(call, kept)
    if pair not in _OTHERS:
        raise UnmappedError(str(call))
    arn = _arn(call, kept)
    context = {"aws:username": (kept.names["caller"],)}
    if call.operation in ("StopTrainingJob", "UpdateTrainingJob"):
        context["aws:ResourceTag/cloudtrain:job"] = ("first",)
    return [Request(action, arn, context) for action in _OTHERS[pair]]


def _of_s3(call: Call, kept: Kept) -> list[Request]:
    place = "arn:aws:s3:::" + fill(call.resource, kept)
    context = {"aws:SecureTransport": ("true",), "s3:TlsVersion": ("1.3",)}
    if call.service == "s3torchconnector":  # AWS's C library uploads in parts, and aborts what it cannot complete
        actions: tuple[str, ...] = ("s3:PutObject", "s3:AbortMultipartUpload")
        keys: tuple[str, ...] = ("kms:Decrypt", "kms:GenerateDataKey")
    elif call.operation in _S3:
        actions, keys = (_S3[call.operation],), _KMS.get(call.operation, ())
    else:
        raise UnmappedError(str(call))
    if call.fields:
        raise UnmappedError(f"{call}: conditions and actions for these fields")
    asked = [Request(action, place, context) for action in actions]
    via = {"kms:ViaService": (f"s3.{kept.names['region']}.amazonaws.com",)}
    encrypted_with = kept.names["data-key"] if call.resource.startswith("{data}") else kept.outputs["kms_key"]
    return asked + [Request(key, encrypted_with, via) for key in keys]


def _of_create(kept: Kept, request: Document) -> list[Request]:
    job = fill("arn:aws:sagemaker:{region}:{account}:training-job/{run}", kept)
    role = str(request["RoleArn"])
    return [
        Request("sagemaker:CreateTrainingJob", job, context_of(request)),
        Request("iam:PassRole", role, {"iam:PassedToService": ("sagemaker.amazonaws.com",)}),
        *(
            [Request("sagemaker:AddTags", job, {"sagemaker:TaggingAction": ("CreateTrainingJob",)})]
            if request.get("Tags")
            else []
        ),
    ]


def context_of(request: Document) -> dict[str, tuple[str, ...]]:
    """Return the condition keys that AWS fills from a CreateTrainingJob document; those it lacks are left out."""
    resources, network = request["ResourceConfig"], request.get("VpcConfig", {})
    output, stopping = request["OutputDataConfig"], request["StoppingCondition"]
    types = [
        resources.get("InstanceType"),
        *(each["InstanceType"] for each in resources.get("InstancePreferences", ())),
    ]
    told = {
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
        for name, value in told.items()
        if value is not None
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_queue(call: Call, kept: Kept) -> list[Request]:
    base = "arn:aws:batch:{region}:{account}:"
    queue, job = fill(f"{base}job-queue/{{queue}}", kept), fill(f"{base}service-job/{{job}}", kept)
    asked = [Request("batch:SubmitServiceJob", queue), Request("batch:SubmitServiceJob", job)]
    if "tags" in call.fields:
        asked.append(Request("batch:TagResource", job))
    to_sagemaker = {"iam:PassedToService": ("sagemaker.amazonaws.com",)}
    return [*asked, Request("iam:PassRole", kept.outputs["role"], to_sagemaker)]


_UNNAMED = {("batch", "DescribeServiceJob"), ("batch", "ListServiceJobs")}
"""Calls about something, whose actions know no resources."""


def _arn(call: Call, kept: Kept) -> str:
    if (call.service, call.operation) in _UNNAMED:
        return "*"
    if call.service == "logs" and "log-stream" not in call.resource:
        # As AWS's denials name a group (CloudWatch Logs User Guide: with `:*` in policies).
        return fill(f"arn:aws:logs:{{region}}:{{account}}:{call.resource}:log-stream:", kept)
    if call.resource == "*" or call.resource.startswith("{"):
        return fill(call.resource, kept)
    region = "" if call.service in ("iam", "budgets") else "{region}"
    account = "763104351884" if call.service == "ecr" else "{account}"
    return fill(f"arn:aws:{call.service}:{region}:{account}:{call.resource}", kept)


def fill(text: str, kept: Kept) -> str:
    """Return a text with the names in braces filled in; a `*` stands for something."""
    filled = re.sub(r"\{([\w-]+)\}", lambda found: kept.names[found[1]], text)
    return re.sub(r"/\*(?=/|$)", "/x", filled)


# ---------------------------------------------------------------- allowed, and used by nobody whom we can record


@dataclass(frozen=True)
class Reason:
    """Why something is allowed that no recorded call uses.

    Attributes:
        policy: One of `IDENTITY`.
        sid: The statement.
        actions: Those of its actions that it is about; empty for all.
        why: For the reader of docs/reference/permissions.md.
    """

    policy: str
    sid: str
    why: str
    actions: tuple[str, ...] = ()

    def covers(self, policy: str, grant: Grant) -> bool:
        """Whether it is about a grant."""
        return (policy, grant.sid) == (self.policy, self.sid) and (not self.actions or grant.action in self.actions)


REASONS = (
    Reason(EXECUTION, "EncryptVolumes", "SageMaker: encrypts the hosts' volumes"),
    Reason(
        EXECUTION,
        "MakeTheLogGroup",
        "SageMaker: its developer guide asks for it, to find a host's stream",
        ("logs:DescribeLogStreams",),
    ),
    Reason(EXECUTION, "WriteMetrics", "SageMaker: `MetricDefinitions` become metrics of CloudWatch"),
    Reason(EXECUTION, "LogInToRegistry", "SageMaker: pulls the image"),
    Reason(EXECUTION, "PullImage", "SageMaker: pulls the image"),
    Reason(EXECUTION, "LookAtNetwork", "SageMaker: network interfaces of the hosts"),
    Reason(EXECUTION, "MakeInterfacesInSubnets", "SageMaker: network interfaces of the hosts"),
    Reason(EXECUTION, "UseInterfacesInSubnets", "SageMaker: network interfaces of the hosts"),
)


# ---------------------------------------------------------------- the proof


@dataclass(frozen=True)
class Use:
    """One request that a recorded call makes, and what allows it."""

    call: Call
    request: Request
    decision: Decision
    grants: tuple[tuple[str, Grant], ...]


@dataclass(frozen=True)
class Proof:
    """What the record says of the policies."""

    uses: tuple[Use, ...]
    all_grants: tuple[tuple[str, Grant], ...]

    @property
    def denied(self) -> list[Use]:
        """Used, but not allowed."""
        return [use for use in self.uses if use.decision != Decision.ALLOWED]

    @cached_property
    def used(self) -> set[tuple[str, Grant]]:
        """What some call needs."""
        return {grant for use in self.uses for grant in use.grants}

    @property
    def unused(self) -> list[tuple[str, Grant]]:
        """Allowed, but needed by no call."""
        return [each for each in self.all_grants if each not in self.used]

    def unexplained(self) -> list[tuple[str, Grant]]:
        """Return what is allowed, needed by no call, and has no reason."""
        return [each for each in self.unused if reason_for(*each) is None]


def reason_for(policy: str, grant: Grant) -> Reason | None:
    """Return why something is allowed that no call needs."""
    return next((reason for reason in REASONS if reason.covers(policy, grant)), None)


def prove(kept: Kept, requests: Sequence[Document], record: Mapping[Call, Call] | None = None) -> Proof:
    """Evaluate every call of the record against the policies of who makes it."""
    uses = []
    for call in sorted((read_record() if record is None else record).values()):
        names = (SUBMIT, LOOK) if call.who == CLIENT else (EXECUTION,)
        for request in requests_of(call, kept, requests):
            allowed = tuple((name, grant) for name in names for grant in granting(kept.policies[name], request))
            uses.append(Use(call, request, _decide(kept, names, call, request), allowed))
    everything = tuple((name, grant) for name in IDENTITY for grant in grants(kept.policies[name]))
    return Proof(tuple(uses), everything)


def _decide(kept: Kept, names: Sequence[str], call: Call, request: Request) -> Decision:
    decision = decide([kept.policies[name] for name in names], request)
    own = f"arn:aws:s3:::{kept.outputs['bucket']}"
    if decision == Decision.ALLOWED and request.action.startswith("s3:") and request.resource.startswith(own):
        if decide([kept.policies["bucket"]], request) == Decision.EXPLICIT:
            return Decision.EXPLICIT
        # The container's way to S3 leads through the endpoint.
        if call.who != CLIENT and "s3_endpoint" in kept.policies:
            return decide([kept.policies["s3_endpoint"]], request)
    return decision


# ---------------------------------------------------------------- the page


def with_tables(text: str, kept: Kept, proof: Proof) -> str:
    """Return docs/reference/permissions.md with its tables as they must be."""

    def table(found: re.Match[str]) -> str:
        others = {"figures": lambda: _figures(proof), CONFIGURE: _configure}
        made = others[found[2]]() if found[2] in others else _table_of(found[2], kept, proof)
        return f"{found[1]}{made}\n{found[3]}"

    return _TABLE.sub(table, text)


def _figures(proof: Proof) -> str:
    calls = {use.call.key for use in proof.uses}
    rows = [
        ("calls recorded (operation, resource, caller)", len(calls)),
        (
            "actions on resources that they need",
            len({(use.request.action, use.request.resource) for use in proof.uses}),
        ),
        ("needed and denied", len(proof.denied)),
        ("allowed (statement, action, resource)", len(proof.all_grants)),
        ("allowed and needed by no recorded call, each with its reason", len(proof.unused)),
        ("allowed and needed by no recorded call, without a reason", len(proof.unexplained())),
    ]
    return _rows(("", "number"), [(name, str(number)) for name, number in rows])


def _configure() -> str:
    rows = [("`sts:GetCallerIdentity`", "AWS answers it to whoever has credentials, whatever a policy says")]
    for call in sorted(read_record().values()):
        if call.by == (CONFIGURE,) and (call.service, call.operation) not in NO_PERMISSION:
            action = _CONFIGURE.get(call.operation) or _S3.get(call.operation) or f"{call.service}:{call.operation}"
            rows.append((f"`{action}`", "asked by `cloudtrain configure`, once, by whoever sets cloudtrain up"))
    return _rows(("action", "why"), rows)


def _table_of(policy: str, kept: Kept, proof: Proof) -> str:
    rows = []
    for name, grant in proof.all_grants:
        if name != policy:
            continue
        rows.append((f"`{grant.action}`", f"`{_named(grant.resource, kept)}`", _who(name, grant, proof), grant.sid))
    return _rows(("action", "resource", "who calls it", "statement"), rows)


def _who(policy: str, grant: Grant, proof: Proof) -> str:
    callers: dict[str, set[str]] = {}
    for use in proof.uses:
        if (policy, grant) in use.grants:
            callers.setdefault(use.call.who, set()).update(use.call.by)
    if not callers:
        reason = reason_for(policy, grant)
        return "nobody" if reason is None else f"*{reason.why}*"
    titles = {"service": "SageMaker"}
    return "; ".join(f"{titles.get(who, who)}: {', '.join(sorted(parts))}" for who, parts in sorted(callers.items()))


def _named(resource: str, kept: Kept) -> str:
    outputs = kept.outputs
    own: dict[str, str] = {
        f"{outputs['bucket']}/{outputs['prefix']}": "{bucket}/{prefix}",
        outputs["bucket"]: "{bucket}",
        outputs["kms_key"]: "{key}",
        outputs["role"]: "{role}",
        **dict.fromkeys(outputs["subnets"], "{subnet}"),
        **dict.fromkeys(outputs["security_groups"], "{group}"),
        kept.names["data-key"]: "{data-key}",
        kept.names["data"]: "{data}",
        kept.names["data-bucket"]: "{data-bucket}",
        kept.names["secret"]: "{secret}",
        f"job-queue/{kept.names['queue']}": "job-queue/{queue}",
        kept.names["account"]: "{account}",
        kept.names["region"]: "{region}",
    }
    for value, name in own.items():
        resource = resource.replace(value, name)
    return resource


def _rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    unique = list(dict.fromkeys(rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, tuple("---" for _ in heads), *unique))


def planned(kept: Kept, root: str = "module") -> list[Document]:
    """Return CreateTrainingJob documents, planned offline with a root's outputs as settings."""
    import tempfile

    from cloudtrain.client import jobs
    from cloudtrain.settings.settings import Settings

    settings = Settings(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in kept.outputs.items()}
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("print('hello')\n")
        for lines in _CLUSTERS[root]:
            path = Path(folder) / "job.yaml"
            path.write_text(_JOB.format(cluster=lines))
            found.append(dict(jobs.plan(path, settings=settings).request))
    return found


_JOB = "name: first\ncode: {{directory: ., script: train.py}}\ncluster: {{{cluster}}}\nlimits: {{runtime: 1h}}\n"
_USUAL = (
    "instance_type: ml.g5.xlarge, instances: 2",
    "instance_type: ml.m5.xlarge, instances: 1",
    "instance_type: ml.p4d.24xlarge, instances: 2, spot: true",
)
_CLUSTERS = {
    "module": _USUAL,
    "minimal": _USUAL,
    "existing-vpc": (
        "instance_type: ml.m5.2xlarge, instances: 2, network: {encrypt_traffic: true}",
        "instance_type: ml.g5.12xlarge, instances: 1, network: {encrypt_traffic: true}",
    ),
}


def main(arguments: list[str]) -> int:
    """Write the page, or keep the policies."""
    match arguments:
        case ["--write"]:
            kept = Kept.read()
            proof = prove(kept, planned(kept))
            PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), kept, proof), encoding="utf-8")
            return 0
        case ["--policies", file]:
            Kept.of(json.loads(Path(file).read_text(encoding="utf-8"))["module"]).write()
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
