"""Checks of the caller, the role, its trust and its permissions."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from support.aws_frontend import Answer, Front, simulation
from support.iam_roles import TRUST
from support.preflight import ACCOUNT, SCRIPT, Checks, client, only_failure, put
from support.simulated_access import read_context

from cloudtrain.errors import SpecError
from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws


def test_a_role_of_another_account(
    account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "arn:aws:iam::999999999999:role/training")
    failure = only_failure(checks(), "identity")
    assert "account 999999999999" in failure.detail
    assert f"CLOUDTRAIN_ROLE to a role of account {ACCOUNT}" in failure.fix


def test_credentials_that_have_expired(account: Front, checks: Checks) -> None:
    body = b"<ErrorResponse><Error><Code>ExpiredToken</Code><Message>expired</Message></Error></ErrorResponse>"
    account.respond("GetCallerIdentity", Answer(body, 403, {"Content-Type": "text/xml"}))
    failure = only_failure(checks(), "identity")
    assert "ExpiredToken" in failure.detail
    assert "export new values of AWS_ACCESS_KEY_ID" in failure.fix


def test_a_role_that_is_missing(
    account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_ROLE", f"arn:aws:iam::{ACCOUNT}:role/teams/vision")
    found = checks()
    failure = only_failure(found, "role")
    assert found["trust"].result is Result.UNKNOWN
    words = shlex.split(failure.fix)
    assert words[:5] == ["aws", "iam", "create-role", "--role-name", "vision"]
    assert words[5:7] == ["--path", "/teams/"]
    # The check accepts the role that the fix creates.
    client("iam").create_role(RoleName=words[4], Path=words[6], AssumeRolePolicyDocument=words[8])
    again = checks()
    assert (again["role"].result, again["trust"].result) == (Result.PASS, Result.PASS)


def test_a_malformed_role_arn_is_rejected(
    account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "training")
    with pytest.raises(
        SpecError, match="CLOUDTRAIN_ROLE  role: 'training' has a form that AWS refuses"
    ):
        checks()


def trust(**changes: Any) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [{**TRUST["Statement"][0], **changes}]}


@pytest.mark.parametrize(
    ("document", "result"),
    [
        (trust(Principal={"Service": "ec2.amazonaws.com"}), "fail"),
        (trust(Principal={"Service": ["ec2.amazonaws.com", "sagemaker.amazonaws.com"]}), "pass"),
        (trust(Action="sts:TagSession"), "fail"),
        (trust(Action=["sts:AssumeRole", "sts:TagSession"]), "pass"),
        (trust(Effect="Deny"), "fail"),
        (trust(Condition={"StringEquals": {"aws:SourceAccount": ACCOUNT}}), "pass"),
        (trust(Condition={"StringEquals": {"aws:SourceAccount": "999999999999"}}), "fail"),
        (
            trust(
                Condition={"ArnLike": {"aws:SourceArn": f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:*"}}
            ),
            "pass",
        ),
        (
            trust(
                Condition={"ArnLike": {"aws:SourceArn": f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:*"}}
            ),
            "fail",
        ),
        (trust(Condition={"StringEquals": {"aws:PrincipalOrgID": "o-1"}}), "unknown"),
    ],
    ids=lambda value: json.dumps(value["Statement"][0]) if isinstance(value, dict) else value,
)
def test_trust(account: Front, checks: Checks, document: dict[str, Any], result: str) -> None:
    iam = client("iam")
    iam.update_assume_role_policy(RoleName="training", PolicyDocument=json.dumps(document))
    found = checks()
    assert found["trust"].result == result
    if result == "fail":
        words = shlex.split(only_failure(found, "trust").fix)
        assert words[:3] == ["aws", "iam", "update-assume-role-policy"]
        iam.update_assume_role_policy(RoleName=words[4], PolicyDocument=words[6])
        assert checks()["trust"].result == "pass"


def test_a_permission_that_is_missing(account: Front, checks: Checks) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"logs:PutLogEvents": "implicitDeny"})
    failure = only_failure(checks(), "permissions")
    assert (
        "logs:PutLogEvents on arn:aws:logs:us-west-2:123456789012:log-group:/aws/sagemaker"
        in failure.detail
    )
    words = shlex.split(failure.fix)
    assert words[:5] == ["aws", "iam", "put-role-policy", "--role-name", "training"]
    (statement,) = json.loads(words[-1])["Statement"]
    assert statement["Action"] == ["logs:PutLogEvents"]


def test_s3_that_only_the_buckets_policy_could_allow(account: Front, checks: Checks) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"s3:ListBucket": "implicitDeny"})
    assert "s3:ListBucket" in only_failure(checks(), "permissions").detail
    policy = {"Version": "2012-10-17", "Statement": []}
    client("s3").put_bucket_policy(Bucket="cloudtrain-test", Policy=json.dumps(policy))
    assert checks()["permissions"].result is Result.UNKNOWN


def test_data_that_only_its_buckets_policy_could_allow(account: Front, checks: Checks) -> None:
    client("s3").create_bucket(
        Bucket="shared", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    put("numbers/one", b"1", bucket="shared")
    policy = {"Version": "2012-10-17", "Statement": []}
    for bucket in ("shared", "cloudtrain-test"):
        client("s3").put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    account.rules["SimulatePrincipalPolicy"] = simulation({"s3:GetObject": "implicitDeny"})
    assert checks("data.train=s3://shared/numbers")["permissions"].result is Result.UNKNOWN


def test_a_conditional_denial_is_no_failure(account: Front, checks: Checks) -> None:
    denied = {"sagemaker:CreateTrainingJob": "explicitDeny", "logs:PutLogEvents": "explicitDeny"}
    account.rules["SimulatePrincipalPolicy"] = simulation(
        denied, missing=("sagemaker:InstanceTypes",)
    )
    found = checks()
    assert {name for name, each in found.items() if each.result is not Result.PASS} == {
        "permissions",
        "caller",
    }
    assert {each.result for each in found.values()} == {Result.PASS, Result.UNKNOWN}


def test_policies_are_simulated_with_the_requests_values(
    account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that limits types, subnets, key or time needs the values that AWS compares with it."""
    key = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/one"
    monkeypatch.setenv("CLOUDTRAIN_KMS_KEY", key)
    monkeypatch.setenv("CLOUDTRAIN_SUBNETS", "subnet-1,subnet-2")
    monkeypatch.setenv("CLOUDTRAIN_SECURITY_GROUPS", "sg-1")
    checks()
    asked = [
        request for request in account.requests if request.operation == "SimulatePrincipalPolicy"
    ]
    facts = {frozenset(request.form("ActionNames")): read_context(request) for request in asked}
    creating = facts[frozenset({"sagemaker:CreateTrainingJob"})]
    assert facts[frozenset({"sagemaker:AddTags"})] == creating
    of_tags = {key for key in creating if key.startswith(("aws:RequestTag/", "aws:TagKeys"))}
    assert {key: creating[key] for key in creating.keys() - of_tags} == {
        "iam:PassedToService": ["sagemaker.amazonaws.com"],
        "sagemaker:TaggingAction": ["CreateTrainingJob"],
        "sagemaker:InstanceTypes": ["ml.m5.xlarge"],
        "sagemaker:VpcSubnets": ["subnet-1", "subnet-2"],
        "sagemaker:VpcSecurityGroupIds": ["sg-1"],
        "sagemaker:OutputKmsKey": [key],
        "sagemaker:OutputKmsKeyArn": [key],
        "sagemaker:VolumeKmsKey": [key],
        "sagemaker:VolumeKmsKeyArn": [key],
        "sagemaker:MaxRuntimeInSeconds": ["86400"],
        "sagemaker:InterContainerTrafficEncryption": ["false"],
    }
    assert facts[frozenset({"kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey"})] == {
        "kms:GrantIsForAWSResource": ["true"],
        "ec2:Subnet": [f"arn:aws:ec2:us-west-2:{ACCOUNT}:subnet/subnet-1"],
    }


def test_a_caller_that_may_not_pass_the_role(account: Front, checks: Checks) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"iam:PassRole": "implicitDeny"})
    failure = only_failure(checks(), "caller")
    assert f"iam:PassRole on arn:aws:iam::{ACCOUNT}:role/training" in failure.detail
    assert "iam:PassRole" in failure.fix
    asked = [request for request in account.requests if b"iam%3APassRole" in request.body]
    assert b"iam%3APassedToService" in asked[0].body


def test_a_session_is_simulated_by_its_role(account: Front, checks: Checks) -> None:
    client("iam").create_role(
        RoleName="people", Path="/sso/", AssumeRolePolicyDocument=json.dumps(TRUST)
    )
    body = (
        '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
        f"<Arn>arn:aws:sts::{ACCOUNT}:assumed-role/people/ada</Arn><UserId>x</UserId><Account>{ACCOUNT}</Account>"
        "</GetCallerIdentityResult></GetCallerIdentityResponse>"
    )
    account.respond("GetCallerIdentity", Answer(body.encode(), 200, {"Content-Type": "text/xml"}))
    assert checks()["caller"].result is Result.PASS
    sources = {
        re.search(rb"PolicySourceArn=([^&]+)", r.body)
        for r in account.requests
        if b"Simulate" in r.body
    }
    assert any(match is not None and match[1].endswith(b"role%2Fsso%2Fpeople") for match in sources)


def test_unsupported_operations_are_unknown(
    aws: dict[str, str], checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("numbers/one", b"1")
    found = checks()
    unknown = {name for name, each in found.items() if each.result is Result.UNKNOWN}
    assert unknown == {"caller", "permissions", "quota", "job quotas"}
    assert not [each for each in found.values() if each.result is Result.FAIL]


SERVER = f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:mlflow-tracking-server/runs"
APP = f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:mlflow-app/app-1234567890AB"


@pytest.mark.parametrize(
    ("arn", "action"), [(SERVER, "sagemaker-mlflow:LogBatch"), (APP, "sagemaker:CallMlflowAppApi")]
)
def test_the_role_may_track_runs_with_mlflow(
    account: Front, checks: Checks, arn: str, action: str
) -> None:
    tracking = (f"tracking={{mlflow: '{arn}'}}",)
    text = SCRIPT
    assert "mlflow" not in checks(text=text)
    assert "mlflow" not in checks("tracking={mlflow: 'https://mlflow.example'}", text=text)
    assert checks(*tracking, text=text)["mlflow"].detail == f"the role may track runs on {arn}"
    account.rules["SimulatePrincipalPolicy"] = simulation({action: "implicitDeny"})
    failure = only_failure(checks(*tracking, text=text), "mlflow")
    assert failure.detail == f"not allowed: {action} on {arn}"
    assert "aws iam put-role-policy" in failure.fix
