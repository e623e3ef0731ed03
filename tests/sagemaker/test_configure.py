"""`cloudtrain configure` with an account: candidates, rejected values, and questions on a terminal."""

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.aws_frontend import Answer, Front
from support.iam_roles import TRUST
from support.jobs import (
    Cli,
    Terminal,
    command,
    until,
)

import cloudtrain
from cloudtrain.errors import CloudError
from cloudtrain.preflight import Candidates
from cloudtrain.settings.settings import load_settings, profile_file

pytestmark = pytest.mark.aws

ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
OTHER_ACCOUNT = '[{"StringEquals": {"aws:SourceAccount": "999999999999"}}]'
KEY = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/12345678-1234-1234-1234-123456789012"
DENIED = Answer(
    b"<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>",
    403,
    {"Content-Type": "text/xml"},
)


def client(service: str, **options: Any) -> Any:
    import boto3

    return boto3.client(service, **options)


@pytest.fixture
def front(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Serve an account with roles and buckets of every kind; leave only credentials in the environment."""
    s3, iam = client("s3"), client("iam")
    west = {"LocationConstraint": "us-west-2"}
    s3.create_bucket(Bucket="plain-bucket", CreateBucketConfiguration=west)
    s3.create_bucket(Bucket="encrypted-bucket", CreateBucketConfiguration=west)
    client("s3", region_name="eu-west-1").create_bucket(
        Bucket="european-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    for bucket, default in {
        "cloudtrain-test": {"SSEAlgorithm": "AES256"},
        "encrypted-bucket": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY},
    }.items():
        rules = {"Rules": [{"ApplyServerSideEncryptionByDefault": default}]}
        s3.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration=rules)
    lambda_ = json.loads(json.dumps(TRUST).replace("sagemaker", "lambda"))
    elsewhere = json.loads(json.dumps(TRUST))
    elsewhere["Statement"][0]["Condition"] = {"StringEquals": {"aws:SourceAccount": "999999999999"}}
    for name, trust in {"function": lambda_, "stranger": elsewhere}.items():
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
    iam.create_role(
        RoleName="linked", Path="/aws-service-role/x/", AssumeRolePolicyDocument=json.dumps(TRUST)
    )
    for name in ("CLOUDTRAIN_ROLE", "CLOUDTRAIN_BUCKET"):
        monkeypatch.delenv(name)
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        yield served


def candidates_by_name(found: Candidates) -> dict[str, tuple[bool, str]]:
    return {each.value.rpartition("/")[2]: (each.fits, each.detail) for each in found.found}


def test_suitable_roles_and_buckets_come_first(front: Front) -> None:
    found = cloudtrain.setup.find_candidates("us-west-2")
    assert candidates_by_name(found["role"]) == {
        "training": (True, ""),
        "function": (
            False,
            "does not trust sagemaker.amazonaws.com, so SageMaker cannot assume it",
        ),
        "stranger": (
            False,
            f"trusts SageMaker only under conditions that this job does not satisfy: {OTHER_ACCOUNT}",
        ),
        "linked": (False, "belongs to an AWS service"),
    }
    assert candidates_by_name(found["bucket"]) == {
        "cloudtrain-test": (True, "encrypted with AES256"),
        "encrypted-bucket": (True, f"encrypted with its key {KEY}"),
        "european-bucket": (False, "is in eu-west-1, not in us-west-2"),
        "plain-bucket": (False, "has no default encryption"),
    }
    assert [each.fits for each in found["bucket"].found] == [True, True, False, False]
    assert [each.kms_key for each in found["bucket"].fitting] == [None, KEY]
    assert found["role"].unanswered == found["bucket"].unanswered == ""


def test_every_bucket_request_names_the_owner(front: Front) -> None:
    cloudtrain.setup.find_candidates("us-west-2")
    about = [
        each
        for each in front.requests
        if each.operation.startswith(("GET /", "HEAD /")) and "-" in each.operation
    ]
    assert about
    for request in about:
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers["x-amz-expected-bucket-owner"] == ACCOUNT, request.operation


def test_only_the_first_roles_are_examined(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.preflight.account.MAX_ROLES", 2)
    found = cloudtrain.setup.find_candidates("us-west-2")["role"]
    assert len(found.found) == 2
    assert (found.unanswered, found.fix) == ("only 2 roles were examined", "give the role's ARN")


def test_missing_permissions_are_reported(front: Front) -> None:
    front.respond("ListRoles", DENIED)
    front.respond("GET /", DENIED)
    front.respond("HEAD /plain-bucket", Answer(b"", 403))
    found = cloudtrain.setup.find_candidates("us-west-2")
    assert found["role"].found == found["bucket"].found == ()
    assert found["role"].unanswered == "these credentials lack the permission iam:ListRoles"
    assert found["bucket"].fix == "grant s3:ListAllMyBuckets to these credentials"
    del front.rules["GET /"]
    front.respond("GET /cloudtrain-test", DENIED)
    seen = candidates_by_name(cloudtrain.setup.find_candidates("us-west-2")["bucket"])
    assert seen["plain-bucket"] == (
        False,
        "cannot be examined without the permission s3:ListBucket",
    )
    assert seen["cloudtrain-test"][0]
    assert "its encryption is unknown" in seen["cloudtrain-test"][1]


def network() -> dict[str, str]:
    """Create two VPCs; return the ids of a subnet and a security group of each."""
    ec2 = client("ec2")
    made = {}
    for name in ("one", "two"):
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        made[f"subnet {name}"] = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"][
            "SubnetId"
        ]
        made[f"group {name}"] = ec2.create_security_group(
            GroupName=name, Description="x", VpcId=vpc
        )["GroupId"]
    return made


GOOD = {"role": ROLE, "bucket": "cloudtrain-test", "region": "us-west-2"}


def test_valid_values_are_stored(front: Front) -> None:
    made = network()
    checks: list[Any] = []
    values = {**GOOD, "subnets": made["subnet one"], "security_groups": made["group one"]}
    cloudtrain.setup.configure(values, on_checks=checks.extend)
    assert {check.name: str(check.result) for check in checks} == dict.fromkeys(
        ("identity", "role", "trust", "bucket", "subnets", "security groups"), "pass"
    )
    assert load_settings(os.environ).bucket == "cloudtrain-test"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"role": f"arn:aws:iam::{ACCOUNT}:role/missing"}, "there is no role missing"),
        (
            {"role": f"arn:aws:iam::{ACCOUNT}:role/function"},
            "the role does not trust sagemaker.amazonaws.com",
        ),
        (
            {"role": "arn:aws:iam::999999999999:role/training"},
            "the role belongs to account 999999999999",
        ),
        ({"bucket": "european-bucket"}, "european-bucket is in eu-west-1, the job in us-west-2"),
        ({"bucket": "missing-bucket"}, "there is no bucket missing-bucket"),
        (
            {"subnets": "subnet-01234567", "security_groups": "group one"},
            "1 subnet not in us-west-2",
        ),
        (
            {"subnets": "subnet one,subnet two", "security_groups": "group one"},
            "the subnets are in 2 VPCs",
        ),
        ({"subnets": "subnet one", "security_groups": "group two"}, "not in the subnets' VPC"),
    ],
)
def test_invalid_values_are_rejected_with_a_fix(
    front: Front, wrong: dict[str, str], message: str
) -> None:
    made = network()
    values = {
        name: ",".join(made.get(part, part) for part in value.split(","))
        for name, value in {**GOOD, **wrong}.items()
    }
    with pytest.raises(CloudError) as caught:
        cloudtrain.setup.configure(values)
    assert message in caught.value.message
    assert "fix: " in caught.value.message
    assert "--offline" in caught.value.hint
    assert not profile_file(os.environ).exists()
    assert cloudtrain.setup.configure(values, offline=True).changes


def test_values_that_cannot_be_checked_are_stored_with_a_note(cli: Cli, front: Front) -> None:
    front.respond("GetRole", DENIED)
    front.respond("HEAD /cloudtrain-test", Answer(b"", 403))
    done = cli(
        "configure", "--set", f"role={ROLE}", "--bucket", "cloudtrain-test", "--region", "us-west-2"
    )
    assert done.code == 0, done.err
    assert "could not check role: these credentials lack the permission iam:GetRole" in done.err
    assert "could not check bucket: cloudtrain-test cannot be read" in done.err


def test_without_credentials_no_request_is_sent(
    cli: Cli, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    done = cli("configure", "--set", f"role={ROLE}", "--json")
    assert done.code == 0
    assert [(each["name"], each["result"]) for each in done.json["checks"]] == [
        ("identity", "unknown")
    ]
    assert "could not check identity: there are no AWS credentials" in done.err
    assert front.seen == []
    assert profile_file(os.environ).exists()


def test_a_malformed_endpoint_url_is_reported(
    cli: Cli, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    found = cloudtrain.setup.find_candidates("us-west-2")
    assert found["role"].fix == found["bucket"].fix == "write AWS_ENDPOINT_URL as http://host:port"
    done = cli("configure", "--set", f"role={ROLE}")
    assert (done.code, "Traceback" in done.err) == (0, False)


def terminal(*arguments: str) -> Terminal:
    environment = {**os.environ, "TERM": "xterm-256color"}
    return Terminal([str(command()), "configure", *arguments], environment, 200)


def answer(shown: Terminal, *answers: tuple[str, str]) -> None:
    for question, text in answers:
        until(functools.partial(shown.shows, question))
        shown.written = b""
        shown.press(f"{text}\n".encode())


def test_it_asks_and_shows_suitable_values(front: Front) -> None:
    shown = terminal("--profile", "team")
    until(lambda: shown.shows("region [us-west-2]"))
    shown.press(b"us-wst-2\n")
    until(lambda: shown.shows('did you mean "us-west-2"?'))
    shown.press(b"\n")
    until(lambda: shown.shows(f"execution role (number or name) [{ROLE}]"))
    assert "execution roles of the account (1 of 4 suitable)" in shown.text
    assert re.search(r"-  \S+role/function +does not trust sagemaker.amazonaws.com", shown.text)
    shown.press(b"\n")
    until(lambda: shown.shows("bucket (number or name)"))
    assert "buckets of the account (2 of 4 suitable)" in shown.text
    assert "-  european-bucket   is in eu-west-1" in shown.text
    answer(
        shown,
        ("bucket (number or name)", "2"),
        ("prefix of everything in the bucket [cloudtrain]", ""),
        ("empty: SageMaker's own network", ""),
        (f"(-: none) [{KEY}]", ""),
        ("store this? [Y/n]", "y"),
    )
    assert shown.end() == 0
    assert "to use it: export CLOUDTRAIN_PROFILE=team" in shown.text
    assert cloudtrain.setup.list_profiles() == {
        "team": {
            "role": ROLE,
            "bucket": "encrypted-bucket",
            "prefix": "cloudtrain",
            "region": "us-west-2",
            "kms_key": KEY,
        }
    }


def test_it_asks_for_values_if_the_account_cannot_be_listed(front: Front) -> None:
    for operation in ("ListRoles", "GET /", "GetRole"):
        front.respond(operation, DENIED)
    shown = terminal()
    answer(shown, ("region [us-west-2]", ""))
    until(lambda: shown.shows("execution role:"))
    assert "these credentials lack the permission iam:ListRoles" in shown.text
    answer(
        shown,
        ("execution role:", ROLE),
        ("bucket:", "cloudtrain-test"),
        ("[cloudtrain]", ""),
        ("SageMaker's own network", ""),
        ("KMS key of volumes and outputs", ""),
        ("store this?", "y"),
    )
    assert shown.end() == 0
    assert load_settings(os.environ).bucket == "cloudtrain-test"


def test_ctrl_c_and_no_change_nothing(front: Front) -> None:
    shown = terminal()
    until(lambda: shown.shows("region [us-west-2]"))
    shown.press(b"\x03")
    assert shown.end() == 130
    assert "nothing was stored" in shown.text
    assert not profile_file(os.environ).exists()
    cloudtrain.setup.configure(GOOD)
    shown = terminal("--set", "bucket=encrypted-bucket")
    until(lambda: shown.shows("replace bucket? [y/N]"))
    assert "~ bucket  cloudtrain-test -> encrypted-bucket" in shown.text
    shown.press(b"\n")
    assert shown.end() == 0
    assert "nothing was stored" in shown.text
    assert load_settings(os.environ).bucket == "cloudtrain-test"


@pytest.mark.promise
def test_a_profile_is_enough_for_plan_and_check(cli: Cli, front: Front, tmp_path: Path) -> None:
    cloudtrain.setup.configure(GOOD, profile="team")
    (tmp_path / "job.yaml").write_text(
        "name: first\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.xlarge}\n"
    )
    (tmp_path / "train.py").write_text("print('hello')\n")
    planned = cli("plan", tmp_path / "job.yaml", "--profile", "team", "--json").json
    assert planned["request"]["RoleArn"] == ROLE
    assert (
        planned["request"]["OutputDataConfig"]["S3OutputPath"] == "s3://cloudtrain-test/cloudtrain"
    )
    checks = cli("--profile", "team", "check", tmp_path / "job.yaml", "--json").json["checks"]
    assert {check["name"]: check["result"] for check in checks}["bucket"] == "pass"
    assert cli("check", tmp_path / "job.yaml").code == 2  # without the profile there is no account
