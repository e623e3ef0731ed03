"""The policies that Terraform renders grant no more than necessary."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.iam_policy import Decision, Request, decide
from support.terraform import (
    MODULE,
    ROOTS,
    as_list,
    of_type,
    one_of_type,
    policy_of,
)

from cloudtrain import catalog

pytestmark = [
    pytest.mark.promise,
    pytest.mark.aws,
    pytest.mark.timeout(1800),  # the first test applies all roots
]

# Actions without resources in policies (Service Authorization Reference, 2026-11).
WITHOUT_RESOURCES = {
    "application-autoscaling:DescribeScalableTargets",
    "batch:DescribeJobQueues",
    "batch:DescribeServiceEnvironments",
    "batch:DescribeServiceJob",
    "batch:ListServiceJobs",
    "cloudwatch:GetMetricStatistics",
    "cloudwatch:PutMetricData",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcEndpoints",
    "ec2:DescribeVpcs",
    "ecr:GetAuthorizationToken",
    "events:ListRuleNamesByTarget",
    "pricing:GetProducts",
    "sagemaker:ListEndpointConfigs",
    "sagemaker:ListEndpoints",
    "sagemaker:ListModels",
    "sagemaker:ListTrainingJobs",
    "sagemaker:Search",
    # Kinds of its own, but none for a training container: its condition names the target.
    "ssm:StartSession",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
    "servicequotas:ListAWSDefaultServiceQuotas",
    "servicequotas:ListServiceQuotas",
}
IDENTITY_POLICIES = (
    ("aws_iam_role_policy", "execution"),
    ("aws_iam_role_policy", "watch"),
    ("aws_iam_role_policy", "starts_watch"),
    ("aws_iam_policy", "submit"),
    ("aws_iam_policy", "look"),
)
PLACES = [
    *((root, kind, name) for kind, name in IDENTITY_POLICIES for root in ROOTS),
    ("module", "aws_iam_policy", "deploy"),  # the examples do not allow endpoints
    ("module", "aws_iam_role_policy", "recovery"),  # nor have they the function
]
MANAGED_CHARACTERS = 6144
INLINE_CHARACTERS = 10240


@pytest.mark.parametrize(("root", "kind", "name"), PLACES)
def test_actions_and_resources_are_named_where_possible(
    applied: dict[str, Any], root: str, kind: str, name: str
) -> None:
    for statement in policy_of(applied[root]["resources"], kind, name)["Statement"]:
        actions = set(as_list(statement["Action"]))
        assert not [action for action in actions if "*" in action]
        assert "NotAction" not in statement
        assert "NotResource" not in statement
        resources = as_list(statement["Resource"])
        if "*" in resources:
            assert actions <= WITHOUT_RESOURCES, (
                f"{statement['Sid']}: {sorted(actions - WITHOUT_RESOURCES)}"
            )
        else:
            assert not actions & WITHOUT_RESOURCES
            # A wildcard is allowed only at the end, below a named prefix.
            assert all(
                re.fullmatch(
                    r"arn:aws:[^*]+([/:]\*(/checkpoints/\*|/manifest\.json|/config/run\.json|/plan\.json)?)?",
                    each,
                )
                for each in resources
            )


@pytest.mark.parametrize("root", ROOTS)
def test_policies_fit_iams_size_limits(applied: dict[str, Any], root: str) -> None:
    for kind, name in ((kind, name) for where, kind, name in PLACES if where == root):
        document = json.dumps(
            policy_of(applied[root]["resources"], kind, name), separators=(",", ":")
        )
        assert len(document) <= (
            MANAGED_CHARACTERS if kind == "aws_iam_policy" else INLINE_CHARACTERS
        )


@pytest.mark.parametrize("root", ROOTS)
def test_every_role_trusts_one_service_for_this_account(applied: dict[str, Any], root: str) -> None:
    trusted = {}
    for role in of_type(applied[root]["resources"], "aws_iam_role"):
        (statement,) = json.loads(role["assume_role_policy"])["Statement"]
        assert statement["Action"] == "sts:AssumeRole"
        assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}
        trusted[role["name"].partition("-")[2].removeprefix("training-")] = statement["Principal"]
    function = {"recovery": {"Service": "lambda.amazonaws.com"}}
    assert trusted == {
        "execution": {"Service": "sagemaker.amazonaws.com"},
        "overlong": {"Service": "states.amazonaws.com"},
        "starts-overlong": {"Service": "events.amazonaws.com"},
        **(function if root == "module" else {}),
    }


def statement(applied: dict[str, Any], root: str, kind: str, name: str, sid: str) -> dict[str, Any]:
    """Return a statement by its Sid."""
    (found,) = [
        each
        for each in policy_of(applied[root]["resources"], kind, name)["Statement"]
        if each["Sid"] == sid
    ]
    return dict(found)


def test_a_job_reads_code_and_never_writes_it(applied: dict[str, Any]) -> None:
    bucket = applied["minimal"]["outputs"]["bucket"]
    denied = statement(
        applied, "minimal", "aws_iam_role_policy", "execution", "CodeIsTheSubmittersOnly"
    )
    assert denied["Effect"] == "Deny"
    assert set(denied["Action"]) == {"s3:PutObject", "s3:DeleteObject"}
    theirs = (
        "*/config/run.json",
        "*/plan.json",
        "chains/*",
        "code/*",
        "packages/*",
        "queues/*",
        "requests/*",
        "sweeps/*",
    )
    assert sorted(denied["Resource"]) == [
        f"arn:aws:s3:::{bucket}/cloudtrain/{each}" for each in theirs
    ]


def test_a_job_deletes_only_checkpoints(applied: dict[str, Any]) -> None:
    bucket = applied["minimal"]["outputs"]["bucket"]
    document = policy_of(applied["minimal"]["resources"], "aws_iam_role_policy", "execution")
    deleting = [
        each
        for each in document["Statement"]
        if each["Effect"] == "Allow"
        and any("Delete" in action for action in as_list(each["Action"]))
    ]
    objects = [
        each["Resource"] for each in deleting if "s3:DeleteObject" in as_list(each["Action"])
    ]
    assert objects == [f"arn:aws:s3:::{bucket}/cloudtrain/*/checkpoints/*"]


def test_only_this_role_may_be_passed_and_only_to_sagemaker(applied: dict[str, Any]) -> None:
    passing = statement(applied, "existing-vpc", "aws_iam_policy", "submit", "PassThisRoleOnly")
    assert passing["Resource"] == applied["existing-vpc"]["outputs"]["role"]
    assert passing["Condition"] == {
        "StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}
    }


def test_jobs_are_created_only_within_the_limits(applied: dict[str, Any]) -> None:
    outputs = applied["existing-vpc"]["outputs"]
    for sid, types in (
        ("CreateWithLocalDisks", ["ml.g5.12xlarge", "ml.p4d.24xlarge"]),
        ("CreateWithVolumes", ["ml.m5.2xlarge"]),
    ):
        condition = statement(applied, "existing-vpc", "aws_iam_policy", "submit", sid)["Condition"]
        only = condition["ForAllValues:StringLike"]["sagemaker:InstanceTypes"]
        assert sorted(as_list(only)) == types
        assert condition["ForAllValues:StringEquals"] == {
            "sagemaker:VpcSubnets": outputs["subnets"][0],
            "sagemaker:VpcSecurityGroupIds": outputs["security_groups"][0],
        }
        # ForAllValues is true for a request without the key.
        assert condition["Null"] == {
            f"sagemaker:{key}": "false"
            for key in ("InstanceTypes", "VpcSecurityGroupIds", "VpcSubnets")
        }
        assert condition["ArnEquals"]["sagemaker:OutputKmsKeyArn"] == outputs["kms_key"]
        # SageMaker rejects a volume key for instance types with local disks.
        has_volumes = sid == "CreateWithVolumes"
        assert condition["ArnEquals"].get("sagemaker:VolumeKmsKeyArn") == (
            outputs["kms_key"] if has_volumes else None
        )
        assert condition["Bool"] == {"sagemaker:InterContainerTrafficEncryption": "true"}
        assert condition["NumericLessThanEquals"] == {
            "sagemaker:MaxRuntimeInSeconds": str(72 * 3600)
        }


def test_ci_gets_both_policies(applied: dict[str, Any]) -> None:
    attached = of_type(applied["existing-vpc"]["resources"], "aws_iam_role_policy_attachment")
    arns = {each["policy_arn"].rpartition("/")[2] for each in attached}
    assert {each["role"] for each in attached} == {"deploy"}
    assert arns == {"vision-training-submit", "vision-training-look"}


def test_submit_policy_lists_the_types_with_local_disks() -> None:
    """The request has no volume key for these types (`request.has_local_storage`), so the policy requires none."""
    pattern = re.search(
        r'regex\("(\^ml[^"]+)"', (MODULE / "submitter.tf").read_text(encoding="utf-8")
    )
    assert pattern is not None
    local = re.compile(pattern[1].replace("\\\\", "\\"))
    known = [
        each
        for name in catalog.instance_names()
        if (each := catalog.find_instance(name)) is not None
    ]
    wrong = [
        each.name
        for each in known
        if each.nvme_gb is not None and bool(local.match(each.name)) != bool(each.nvme_gb)
    ]
    assert len(known) > 10
    assert wrong == []


@pytest.mark.parametrize("root", ROOTS)
def test_bucket_is_closed(applied: dict[str, Any], root: str) -> None:
    resources, outputs = applied[root]["resources"], applied[root]["outputs"]
    block = one_of_type(resources, "aws_s3_bucket_public_access_block")
    names = (
        "block_public_acls",
        "block_public_policy",
        "ignore_public_acls",
        "restrict_public_buckets",
    )
    assert all(block[name] for name in names)
    (owner,) = one_of_type(resources, "aws_s3_bucket_ownership_controls")["rule"]
    assert owner["object_ownership"] == "BucketOwnerEnforced"
    (versioning,) = one_of_type(resources, "aws_s3_bucket_versioning")["versioning_configuration"]
    assert versioning["status"] == "Enabled"
    (rule,) = one_of_type(resources, "aws_s3_bucket_server_side_encryption_configuration")["rule"]
    (default,) = rule["apply_server_side_encryption_by_default"]
    assert (default["sse_algorithm"], default["kms_master_key_id"]) == (
        "aws:kms",
        outputs["kms_key"],
    )


def test_bucket_refuses_plain_http_old_tls_and_other_keys(applied: dict[str, Any]) -> None:
    policy = policy_of(applied["minimal"]["resources"], "aws_s3_bucket_policy", "this")
    assert {each["Sid"]: each["Effect"] for each in policy["Statement"]} == dict.fromkeys(
        ("OnlyOverTls", "OnlyNewTls", "OnlyThisKey", "OnlyThisEncryption", "NoKeyOfTheClient"),
        "Deny",
    )
    assert all(each["Principal"] == "*" for each in policy["Statement"])
    outputs = applied["minimal"]["outputs"]
    resource = f"arn:aws:s3:::{outputs['bucket']}/cloudtrain/x"
    good = {"aws:SecureTransport": ("true",), "s3:TlsVersion": ("1.2",)}
    encryption, header = (
        "s3:x-amz-server-side-encryption",
        {"s3:x-amz-server-side-encryption": ("aws:kms",)},
    )
    for changed, is_refused in (
        ({}, False),
        ({"s3:TlsVersion": ("1.3",)}, False),
        ({**header, f"{encryption}-aws-kms-key-id": (outputs["kms_key"],)}, False),
        ({"aws:SecureTransport": ("false",)}, True),
        ({"s3:TlsVersion": ("1.1",)}, True),
        ({**header, f"{encryption}-aws-kms-key-id": (f"{outputs['kms_key']}0",)}, True),
        ({encryption: ("AES256",)}, True),
        ({encryption: ("aws:kms:dsse",)}, True),
        ({f"{encryption}-customer-algorithm": ("AES256",)}, True),
    ):
        found = decide([policy], Request("s3:PutObject", resource, {**good, **changed}))
        assert found is (Decision.EXPLICIT if is_refused else Decision.IMPLICIT), changed


@pytest.mark.parametrize("root", ROOTS)
def test_objects_of_runs_never_expire(applied: dict[str, Any], root: str) -> None:
    """Lifecycle rules apply to prefixes. Current objects expire only below `code` and `requests`."""
    prefix = applied[root]["outputs"]["prefix"]
    lifecycle = one_of_type(applied[root]["resources"], "aws_s3_bucket_lifecycle_configuration")
    rules = {each["id"]: each for each in lifecycle["rule"]}
    assert set(rules) == {"incomplete-uploads", "replaced-and-deleted", "old-bundles", "old-claims"}
    expiring = {
        each["filter"][0]["prefix"]: each["expiration"][0]["days"]
        for each in rules.values()
        if each["expiration"] and each["expiration"][0]["days"]
    }
    assert expiring == {f"{prefix}/code/": 180, f"{prefix}/requests/": 180}
    assert all(not each["transition"] for each in rules.values())
    uploads = rules["incomplete-uploads"]
    assert uploads["abort_incomplete_multipart_upload"][0]["days_after_initiation"] == 7
    assert not uploads["filter"][0]["prefix"]
    old = rules["replaced-and-deleted"]
    assert old["noncurrent_version_expiration"][0]["noncurrent_days"] == 7


def test_hosts_reach_only_each_other_and_aws(applied: dict[str, Any]) -> None:
    resources = applied["minimal"]["resources"]
    group = applied["minimal"]["outputs"]["security_groups"][0]
    egress = of_type(resources, "aws_vpc_security_group_egress_rule")
    ingress = of_type(resources, "aws_vpc_security_group_ingress_rule")
    assert not [each for each in (*egress, *ingress) if each["cidr_ipv4"] or each["cidr_ipv6"]]
    assert {
        each["security_group_id"]
        for each in ingress
        if each["referenced_security_group_id"] != group
    } == set()
    for rules in (egress, of_type(resources, "aws_vpc_security_group_ingress_rule", "among_hosts")):
        among = [each for each in rules if each["ip_protocol"] == "-1"]
        # EFA needs a rule that refers to the group itself.
        assert [each["referenced_security_group_id"] for each in among] == [group]
    assert not of_type(resources, "aws_internet_gateway")
    assert not of_type(resources, "aws_nat_gateway")


def test_endpoints_are_those_that_jobs_need(applied: dict[str, Any]) -> None:
    services = {
        each["service_name"].removeprefix("com.amazonaws.us-west-2."): each["vpc_endpoint_type"]
        for each in of_type(applied["minimal"]["resources"], "aws_vpc_endpoint")
    }
    interfaces = ("ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts")
    assert services == {"s3": "Gateway", **dict.fromkeys(interfaces, "Interface")}


def test_a_job_uses_no_credentials_of_another_account(applied: dict[str, Any]) -> None:
    for endpoint in of_type(applied["minimal"]["resources"], "aws_vpc_endpoint", "interface"):
        policy = json.loads(endpoint["policy"])
        for account, expected in (
            ("123456789012", Decision.ALLOWED),
            ("210987654321", Decision.IMPLICIT),
        ):
            asked = Request("sts:GetCallerIdentity", "*", {"aws:PrincipalAccount": (account,)})
            assert decide([policy], asked) is expected, endpoint["service_name"]


def test_alarm_sources_may_publish_to_the_topic(applied: dict[str, Any]) -> None:
    """AWS's services may publish to the topic and use the key that encrypts it."""
    resources = applied["minimal"]["resources"]
    topic, key = one_of_type(resources, "aws_sns_topic"), applied["minimal"]["outputs"]["kms_key"]
    assert topic["kms_master_key_id"] == key
    allowed = policy_of(resources, "aws_sns_topic_policy", "alerts")["Statement"]
    publishers = {each["Principal"]["Service"]: each for each in allowed}
    assert set(publishers) == {"events.amazonaws.com", "budgets.amazonaws.com"}
    for each in allowed:
        assert (each["Effect"], each["Action"], each["Resource"]) == (
            "Allow",
            "sns:Publish",
            topic["arn"],
        )
    encrypting = {
        each["Principal"]["Service"]: each
        for each in json.loads(one_of_type(resources, "aws_kms_key")["policy"])["Statement"]
        if "Service" in each["Principal"]
    }
    for service, publish in publishers.items():
        assert {"kms:Decrypt", "kms:GenerateDataKey"} <= set(encrypting[service]["Action"])
        assert encrypting[service].get("Condition") == publish.get("Condition")
    (target,) = of_type(resources, "aws_cloudwatch_event_target", "ended_badly")
    assert target["arn"] == topic["arn"]
    (message,) = target["input_transformer"]
    assert set(re.findall(r"<(\w+)>", message["input_template"])) == set(message["input_paths"])
    watching = policy_of(resources, "aws_iam_role_policy", "watch")["Statement"]
    publishing = [each for each in watching if "sns:Publish" in as_list(each["Action"])]
    assert [each["Resource"] for each in publishing] == [topic["arn"]]


def test_event_rules_match_jobs_of_this_role(applied: dict[str, Any]) -> None:
    rules = {
        each["name"].rpartition("cloudtrain-")[2]: json.loads(each["event_pattern"])["detail"]
        for each in of_type(applied["minimal"]["resources"], "aws_cloudwatch_event_rule")
    }
    role = [applied["minimal"]["outputs"]["role"]]
    assert rules == {
        "ended-badly": {"RoleArn": role, "TrainingJobStatus": ["Failed", "Stopped"]},
        "began": {
            "RoleArn": role,
            "TrainingJobStatus": ["InProgress"],
            "SecondaryStatus": ["Training"],
        },
    }


def test_only_two_rules_of_this_account_call_the_function(applied: dict[str, Any]) -> None:
    resources = applied["module"]["resources"]
    function = one_of_type(resources, "aws_lambda_function")
    targets = of_type(resources, "aws_cloudwatch_event_target", "recovery")
    assert {each["arn"] for each in targets} == {function["arn"]}
    rules = {
        each["arn"]: each
        for each in of_type(resources, "aws_cloudwatch_event_rule")
        if each["name"] in {target["rule"] for target in targets}
    }
    patterns = [json.loads(each["event_pattern"] or "{}") for each in rules.values()]
    ended = [each["detail"] for each in patterns if each]
    assert ended == [
        {
            "RoleArn": [applied["module"]["outputs"]["role"]],
            "TrainingJobStatus": ["Completed", "Failed", "Stopped"],
        }
    ]
    assert {each["schedule_expression"] or "" for each in rules.values()} == {"", "rate(5 minutes)"}
    allowed = of_type(resources, "aws_lambda_permission")
    assert {each["source_arn"] for each in allowed} == set(rules)
    for each in allowed:
        assert each["principal"] == "events.amazonaws.com"
        assert each["source_account"] == "123456789012"
    assert of_type(resources, "aws_lambda_function_url") == []


def test_the_function_has_the_settings_of_submitters(applied: dict[str, Any]) -> None:
    outputs = applied["module"]["outputs"]
    function = one_of_type(applied["module"]["resources"], "aws_lambda_function")
    (environment,) = function["environment"]
    given = {
        name.removeprefix("CLOUDTRAIN_").lower(): value
        for name, value in environment["variables"].items()
    }
    own = {"home": "/tmp", "transport": "boto3"}  # noqa: S108 (what Lambda lets a function write to)
    settings = {name: value for name, value in outputs.items() if name not in ("lustre", *own)}
    expected = {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in settings.items()
    }
    assert given == {**expected, **own}


def test_the_function_may_create_what_submitters_may(applied: dict[str, Any]) -> None:
    """Its jobs have the same limits, and it can neither tune, tag, read nor delete anything else."""
    resources = applied["module"]["resources"]
    theirs = policy_of(resources, "aws_iam_policy", "submit")["Statement"]
    own = policy_of(resources, "aws_iam_role_policy", "recovery")["Statement"]
    creating = [each for each in theirs if each["Action"] == "sagemaker:CreateTrainingJob"]
    assert [each for each in own if each["Action"] == "sagemaker:CreateTrainingJob"] == creating
    actions = {action for each in own for action in as_list(each["Action"])}
    assert not [each for each in actions if "Delete" in each or "Tuning" in each]
    written = statement(applied, "module", "aws_iam_role_policy", "recovery", "Write")["Resource"]
    base = f"arn:aws:s3:::{applied['module']['outputs']['bucket']}/cloudtrain"
    assert sorted(written) == [
        f"{base}/{each}" for each in ("*/config/run.json", "*/plan.json", "chains/*", "requests/*")
    ]
