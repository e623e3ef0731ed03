"""All checks of an account together, and the commands that run them."""

import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from conftest import TRUST
from support.aws_frontend import (
    Answer,
    Front,
    Request,
    quotas,
    simulation,
)
from support.jobs import EXAMPLES, REPOSITORY, Cli

import cloudtrain
from cloudtrain.errors import SpecError
from cloudtrain.preflight import ACTIONS, Check, Result, run_checks
from cloudtrain_runtime.contract.manifest import Manifest, StoredFile, checkpoint_folder_name

pytestmark = pytest.mark.aws

ACCOUNT = "123456789012"
ENOUGH = {
    f"{kind} for {use}": 8
    for kind in ("ml.p4d.24xlarge", "ml.m5.xlarge", "ml.g5.xlarge")
    for use in ("training job usage", "spot training job usage", "training warm pool usage")
}
JOB = """\
name: demo
code: {task: "mine:Mine"}
cluster: {instance_type: ml.m5.xlarge, instances: 2}
data: {train: "s3://cloudtrain-test/numbers/"}
train: {epochs: 1}
checkpoint: {uri: "s3://cloudtrain-test/saved"}
"""
SCRIPT = """\
name: demo
code: {script: train.py}
cluster: {instance_type: ml.m5.xlarge}
checkpoint: {uri: "s3://cloudtrain-test/saved"}
"""


def client(service: str, **options: Any) -> Any:
    import boto3

    return boto3.client(service, **options)


@pytest.fixture
def account(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Serve an account that has everything that the job needs."""
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.rules["SimulatePrincipalPolicy"] = simulation()
        front.say("ListServiceQuotas", quotas(ENOUGH))
        front.say("ListAWSDefaultServiceQuotas", quotas({}))
        for name in ("one", "two", "three"):
            put(f"numbers/{name}", b"12345")
        yield front


def put(key: str, body: bytes = b"", bucket: str = "cloudtrain-test") -> None:
    client("s3").put_object(Bucket=bucket, Key=key, Body=body)


@pytest.fixture
def checks(job: Callable[..., Path]) -> Callable[..., dict[str, Check]]:
    """Return a function that checks a job with overrides and returns the checks by name."""

    def check(*overrides: str, text: str = JOB) -> dict[str, Check]:
        path = job(text, mine_py="class Mine(Task):\n    def __init__(self): ...\n", train_py="")
        found = cloudtrain.check(cloudtrain.validate(path, overrides))
        assert len({each.name for each in found}) == len(found)
        return {each.name: each for each in found}

    return check


Checks = Callable[..., dict[str, Check]]


def only_failure(found: dict[str, Check], name: str) -> Check:
    """Return the one check that failed."""
    assert [each.name for each in found.values() if each.result is Result.FAIL] == [name]
    assert found[name].fix, "a failure without a fix"
    return found[name]


def test_a_correct_account_passes_every_check(account: Front, checks: Checks) -> None:
    found = checks()
    assert {name: str(each.result) for name, each in found.items()} == dict.fromkeys(
        (
            *("identity", "caller", "role", "trust", "permissions", "bucket", "data.train", "volume", "checkpoints"),
            *("quota", "image", "network", "budget"),
        ),
        "pass",
    )
    assert "3 objects, 15 B" in found["data.train"].detail
    assert "0 of 8 in use, the job needs 2" in found["quota"].detail
    assert all(not each.fix for each in found.values())


def test_checks_change_nothing(account: Front, checks: Checks) -> None:
    account.seen.clear()
    checks()
    assert {name for name in account.seen if not name.startswith(("Get", "List", "Describe", "Simulate", "Batch"))} == {
        *("HEAD /cloudtrain-test", "GET /cloudtrain-test"),
    }


# ---------------------------------------------------------------- identity and role


def test_a_role_of_another_account(account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "arn:aws:iam::999999999999:role/training")
    failure = only_failure(checks(), "identity")
    assert "account 999999999999" in failure.detail
    assert f"CLOUDTRAIN_ROLE to a role of account {ACCOUNT}" in failure.fix


def test_credentials_that_have_expired(account: Front, checks: Checks) -> None:
    body = b"<ErrorResponse><Error><Code>ExpiredToken</Code><Message>expired</Message></Error></ErrorResponse>"
    account.say("GetCallerIdentity", Answer(body, 403, {"Content-Type": "text/xml"}))
    failure = only_failure(checks(), "identity")
    assert "ExpiredToken" in failure.detail
    assert "sign in again" in failure.fix


def test_a_role_that_is_missing(account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_malformed_role_arn_is_rejected(account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "training")
    with pytest.raises(SpecError, match="CLOUDTRAIN_ROLE  role: 'training' has a form that AWS refuses"):
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
        (trust(Condition={"ArnLike": {"aws:SourceArn": f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:*"}}), "pass"),
        (trust(Condition={"ArnLike": {"aws:SourceArn": f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:*"}}), "fail"),
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
    assert "logs:PutLogEvents on arn:aws:logs:us-west-2:123456789012:log-group:/aws/sagemaker" in failure.detail
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
    client("s3").create_bucket(Bucket="shared", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    put("numbers/one", b"1", bucket="shared")
    policy = {"Version": "2012-10-17", "Statement": []}
    for bucket in ("shared", "cloudtrain-test"):
        client("s3").put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    account.rules["SimulatePrincipalPolicy"] = simulation({"s3:GetObject": "implicitDeny"})
    assert checks("data.train=s3://shared/numbers")["permissions"].result is Result.UNKNOWN


def test_a_conditional_denial_is_no_failure(account: Front, checks: Checks) -> None:
    denied = {"sagemaker:CreateTrainingJob": "explicitDeny", "logs:PutLogEvents": "explicitDeny"}
    account.rules["SimulatePrincipalPolicy"] = simulation(denied, missing=("sagemaker:InstanceTypes",))
    found = checks()
    assert {name for name, each in found.items() if each.result is not Result.PASS} == {"permissions", "caller"}
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
    asked = [request for request in account.requests if request.operation == "SimulatePrincipalPolicy"]
    facts = {frozenset(request.form("ActionNames")): facts_of(request) for request in asked}
    assert facts[frozenset({"sagemaker:CreateTrainingJob", "sagemaker:AddTags"})] == {
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


def facts_of(request: Request) -> dict[str, list[str]]:
    """Return the context keys of a request to simulate policies."""
    form = parse_qs(request.body.decode())
    names = {key: value[0] for key, value in form.items() if key.endswith(".ContextKeyName")}
    return {
        name: [form[each][0] for each in sorted(form) if each.startswith(key.replace("KeyName", "KeyValues"))]
        for key, name in names.items()
    }


def test_a_caller_that_may_not_pass_the_role(account: Front, checks: Checks) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"iam:PassRole": "implicitDeny"})
    failure = only_failure(checks(), "caller")
    assert f"iam:PassRole on arn:aws:iam::{ACCOUNT}:role/training" in failure.detail
    assert "iam:PassRole" in failure.fix
    asked = [request for request in account.requests if b"iam%3APassRole" in request.body]
    assert b"iam%3APassedToService" in asked[0].body


def test_a_session_is_simulated_by_its_role(account: Front, checks: Checks) -> None:
    client("iam").create_role(RoleName="people", Path="/sso/", AssumeRolePolicyDocument=json.dumps(TRUST))
    body = (
        '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
        f"<Arn>arn:aws:sts::{ACCOUNT}:assumed-role/people/ada</Arn><UserId>x</UserId><Account>{ACCOUNT}</Account>"
        "</GetCallerIdentityResult></GetCallerIdentityResponse>"
    )
    account.say("GetCallerIdentity", Answer(body.encode(), 200, {"Content-Type": "text/xml"}))
    assert checks()["caller"].result is Result.PASS
    sources = {re.search(rb"PolicySourceArn=([^&]+)", r.body) for r in account.requests if b"Simulate" in r.body}
    assert any(match is not None and match[1].endswith(b"role%2Fsso%2Fpeople") for match in sources)


def test_unsupported_operations_are_unknown(
    aws: dict[str, str], checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("numbers/one", b"1")
    found = checks()
    unknown = {name for name, each in found.items() if each.result is Result.UNKNOWN}
    assert unknown == {"caller", "permissions", "quota"}
    assert not [each for each in found.values() if each.result is Result.FAIL]


# ---------------------------------------------------------------- bucket and data


def test_a_bucket_that_is_missing(account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_BUCKET", "not-there")
    failure = only_failure(checks(), "bucket")
    assert failure.fix == "aws s3 mb s3://not-there --region us-west-2"


def test_a_bucket_in_another_region(account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    client("s3", region_name="eu-west-1").create_bucket(
        Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    monkeypatch.setenv("CLOUDTRAIN_BUCKET", "far-away")
    failure = only_failure(checks(), "bucket")
    assert failure.detail == "far-away is in eu-west-1, the job in us-west-2"
    assert "aws s3 mb s3://far-away-us-west-2 --region us-west-2" in failure.fix
    found = checks("data.train=s3://far-away/numbers", text=JOB)
    assert "SageMaker reads only buckets of the job's region" in found["data.train"].detail


def refuse_owner(request: Request) -> Answer | None:
    """Deny a request with an expected owner, as S3 does if another account owns the bucket. moto ignores it."""
    return Answer(b"", 403) if "x-amz-expected-bucket-owner" in request.headers else None


def test_a_bucket_of_another_account(account: Front, checks: Checks) -> None:
    account.rules["HEAD /cloudtrain-test"] = refuse_owner
    failure = only_failure(checks(text=SCRIPT), "bucket")
    assert "belongs to another account" in failure.detail
    assert f"a bucket of account {ACCOUNT}" in failure.fix


def test_a_bucket_that_cannot_be_read(account: Front, checks: Checks) -> None:
    account.say("HEAD /cloudtrain-test", Answer(b"", 403))
    found = checks(text=SCRIPT)
    assert found["bucket"].result is Result.UNKNOWN
    assert "grant s3:ListBucket" in found["bucket"].fix


def test_only_our_bucket_is_queried_with_its_owner(account: Front, checks: Checks) -> None:
    client("s3").create_bucket(Bucket="shared", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    put("numbers/one", b"1", bucket="shared")
    account.requests.clear()
    assert checks("data.train=s3://shared/numbers")["data.train"].result is Result.PASS
    owners = {
        (request.operation.rpartition("/")[2], request.headers.get("x-amz-expected-bucket-owner"))
        for request in account.requests
        if request.operation.endswith(("/cloudtrain-test", "/shared"))
    }
    assert owners == {("cloudtrain-test", ACCOUNT), ("shared", None)}


def test_an_empty_prefix(account: Front, checks: Checks) -> None:
    put("nothing/")  # the console's empty folder
    failure = only_failure(checks("data.train=s3://cloudtrain-test/nothing"), "data.train")
    assert failure.detail == "there are no objects below s3://cloudtrain-test/nothing"
    assert failure.fix == "aws s3 sync FOLDER s3://cloudtrain-test/nothing"


def test_a_data_bucket_that_is_missing(account: Front, checks: Checks) -> None:
    assert "no bucket not-there" in only_failure(checks("data.train=s3://not-there/x"), "data.train").detail


def test_a_prefix_that_includes_neighbours_fails(account: Front, checks: Checks) -> None:
    assert checks("data.train=s3://cloudtrain-test/numbers")["data.train"].result is Result.PASS
    put("numbers-old/four", b"1")
    failure = only_failure(checks("data.train=s3://cloudtrain-test/numbers"), "data.train")
    assert "also includes s3://cloudtrain-test/numbers-old/" in failure.detail
    assert failure.fix == "for the folder only, write s3://cloudtrain-test/numbers/"
    assert checks("data.train=s3://cloudtrain-test/numbers/")["data.train"].result is Result.PASS


@pytest.mark.parametrize(
    ("uri", "detail", "fix"),
    [
        ("single.csv", "also includes s3://cloudtrain-test/single.csv.bak", "move the object to a separate folder"),
        (
            "sing",
            "there is no object or folder s3://cloudtrain-test/sing;",
            "write s3://cloudtrain-test/single.csv",
        ),
        ("num", "there is no object or folder s3://cloudtrain-test/num;", "write s3://cloudtrain-test/numbers/"),
    ],
)
def test_an_ambiguous_uri_names_the_remedy(account: Front, checks: Checks, uri: str, detail: str, fix: str) -> None:
    put("single.csv", b"1")
    put("single.csv.bak", b"1")
    failure = only_failure(checks(f"data.train=s3://cloudtrain-test/{uri}"), "data.train")
    assert detail in failure.detail
    assert fix in failure.fix


def test_fewer_objects_than_shards_fail(account: Front, checks: Checks) -> None:
    sharded = "data.train={uri: 's3://cloudtrain-test/numbers/', sharded: true}"
    assert checks(sharded, "cluster.instances=3")["data.train"].result is Result.PASS
    failure = only_failure(checks(sharded, "cluster.instances=4"), "data.train")
    assert "--set data.train.sharded=false" in failure.fix


def listing(count: int, size: int, *, truncated: bool = False) -> Answer:
    objects = "".join(f"<Contents><Key>numbers/{i}</Key><Size>{size}</Size></Contents>" for i in range(count))
    more = f"<IsTruncated>{str(truncated).lower()}</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    text = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{more}{objects}</ListBucketResult>'
    return Answer(text.encode(), 200, {"Content-Type": "application/xml"})


def serve_listing(front: Front, answer: Answer) -> None:
    client("s3").create_bucket(Bucket="large", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    front.rules["GET /large"] = lambda request: answer


LARGE = "data.train={uri: 's3://large/numbers/'}"


def test_a_volume_that_is_too_small(account: Front, checks: Checks) -> None:
    serve_listing(account, listing(4, 70 * 10**9))
    failure = only_failure(checks(LARGE), "volume")
    assert "280.0 GB are downloaded to each instance" in failure.detail
    assert "cluster.volume: 300GB" in failure.fix
    assert checks(LARGE, "cluster.volume=300GB")["volume"].result is Result.PASS
    assert checks(LARGE.replace("}", ", mode: FastFile}"))["volume"].result is Result.PASS
    shared_out = LARGE.replace("}", ", sharded: true}")
    assert only_failure(checks(shared_out), "volume").detail.startswith("140.0 GB")
    assert checks(shared_out, "cluster.volume=150GB")["volume"].result is Result.PASS


def test_local_nvme_replaces_the_volume(account: Front, checks: Checks) -> None:
    serve_listing(account, listing(4, 70 * 10**9))
    assert checks(LARGE, "cluster.instance_type=ml.p4d.24xlarge")["volume"].result is Result.PASS


def test_a_long_listing_is_a_lower_bound(account: Front, checks: Checks) -> None:
    serve_listing(account, listing(2, 10**6, truncated=True))
    found = checks(LARGE)
    assert "at least 2 objects" in found["data.train"].detail
    assert found["volume"].result is Result.UNKNOWN
    assert account.seen.count("GET /large") == 20


def test_local_data_counts_towards_the_volume(account: Front, checks: Checks, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with (tmp_path / "here" / "sparse").open("wb") as file:
        file.truncate(40 * 10**9)
    found = checks("data.train=../here")
    assert "data.train" not in found
    assert "40.0 GB are downloaded" in only_failure(found, "volume").detail


# ---------------------------------------------------------------- checkpoints


def save(
    step: int,
    *,
    run: str = "other",
    size: int = 3,
    place: str = "saved",
    attempt: str = "",
    training: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint of one file; return its folder. With another size than 3 it is incomplete."""
    folder = f"{place}/{checkpoint_folder_name(step, attempt)}"
    put(f"{folder}/model.pt", b"123")
    manifest = Manifest(
        run=run,
        attempt=attempt or "0a1b2c3d",
        step=step,
        time=float(step),
        world_size=1,
        mesh={},
        rng={},
        torch="2.13.0",
        code="",
        request="",
        state={"data": {"epoch": step // 10}},
        files={"model.pt": StoredFile(size, (0,))},
        training=training or {},
    )
    put(f"{folder}/manifest.json", manifest.to_json().encode())
    return folder


def test_the_resumed_checkpoint_is_reported(account: Front, checks: Checks) -> None:
    save(10)
    save(20, run="newer")
    save(30, size=4)  # incomplete: a file has another size than its manifest says
    put("saved/step-00000040/model.pt", b"123")  # without a manifest
    put(f"{save(50)}/damaged.json", b"{}")  # marked as damaged
    assert checks()["checkpoints"].detail == "will resume from step 20 of run newer"
    save(30, attempt="1a2b3c4d")
    assert checks()["checkpoints"].detail == "will resume from step 30 of run other"


def test_submit_prints_what_it_continues_from(account: Front, cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, mine_py="class Mine(Task):\n    def __init__(self): ...\n")
    own = cloudtrain.plan(cloudtrain.validate(path)).config.training
    save(10, training={**own, "entry": "mine:Other"})
    refused = cli("submit", path)
    assert refused.code == 3
    assert "another training (step 10 of run other: entry is 'mine:Other' there and 'mine:Mine' here)" in refused.err

    save(20, run="newer", training=own)
    environ = {"CLOUDTRAIN_TRANSPORT": "boto3"}
    done = cli("submit", path, "--json", environ=environ)
    assert done.code == 0, done.err
    assert "\ncheckpoints: will resume from step 20 of run newer\n" in f"\n{done.err}"
    warning = "nothing is left to train: step 20 of run newer is the last step"
    assert f"warning: {warning}" in done.err
    assert [text for text in done.json["warnings"] if text.startswith(warning)]
    assert f"warning: {warning}" in cli("check", path, environ=environ).out

    save(30, run="oldest")
    longer = cli("submit", path, "--set", "train.epochs=9", environ=environ)
    assert longer.code == 0, longer.err
    assert "nothing is left" not in longer.err
    assert "warning: step 30 of run oldest does not name its training (cloudtrain 0.1 saved it)" in longer.err


def test_foreign_objects(account: Front, checks: Checks) -> None:
    put("saved/photo.jpg", b"1")
    failure = only_failure(checks(), "checkpoints")
    assert "such as saved/photo.jpg" in failure.detail
    assert re.search(r"--set checkpoint\.uri=s3://cloudtrain-test/saved/demo-\d+-\d+-\w+$", failure.fix)
    assert checks(text=SCRIPT)["checkpoints"].result is Result.PASS  # a script's checkpoints may have any name


def test_never_beside_another_runs_checkpoints(account: Front, checks: Checks) -> None:
    save(10)
    failure = only_failure(checks("checkpoint.resume=never"), "checkpoints")
    assert "holds step 10 of run other" in failure.detail


def test_the_checkpoint_folder_of_a_running_run(account: Front, checks: Checks) -> None:
    """Each run keeps the newest checkpoints of its folder, so two runs would delete each other's."""
    save(10, run="other")
    start_job("other", 1)  # ends at once, in moto
    assert "from step 10 of run other" in checks()["checkpoints"].detail
    resumed = "checkpoint.resume=s3://cloudtrain-test/saved"
    for status in ("InProgress", "Stopping"):
        account.say("DescribeTrainingJob", Answer.json({"TrainingJobStatus": status, "CreationTime": 1.0}))
        failure = only_failure(checks(), "checkpoints")
        assert failure.detail.startswith(
            "run other is still running and also saves to s3://cloudtrain-test/saved (step 10)"
        )
        assert "cloudtrain stop other" in failure.fix
        assert re.search(r"--set checkpoint\.uri=s3://cloudtrain-test/saved/demo-\d+-\d+-\w+$", failure.fix)
        assert only_failure(checks(resumed), "checkpoints").detail == failure.detail
        elsewhere = checks("checkpoint.uri=s3://cloudtrain-test/mine", resumed)["checkpoints"]
        assert elsewhere.result is Result.PASS  # reading while the other run writes is safe
    account.say("DescribeTrainingJob", Answer.denied())
    assert "sagemaker:DescribeTrainingJob" in checks()["checkpoints"].detail


def test_resume_from_a_uri(account: Front, checks: Checks) -> None:
    resume = "checkpoint.resume=s3://cloudtrain-test/elsewhere"
    assert "no complete checkpoint" in only_failure(checks(resume), "checkpoints").detail
    save(7, place="elsewhere")
    assert "from step 7 of run other, in s3://cloudtrain-test/elsewhere" in checks(resume)["checkpoints"].detail
    assert checks(f"{resume}/step-00000007")["checkpoints"].result is Result.PASS
    assert checks(f"{resume}/step-00000008")["checkpoints"].result is Result.FAIL
    save(9, place="elsewhere", attempt="1a2b3c4d")
    assert "step 9" in checks(f"{resume}/step-00000009-1a2b3c4d")["checkpoints"].detail


def test_named_checkpoint_precedes_the_runs_own_folder(account: Front, checks: Checks) -> None:
    save(500)
    save(300)
    assert "from step 300" in checks("checkpoint.resume=s3://cloudtrain-test/saved/step-00000300")["checkpoints"].detail


def test_only_the_resumed_runs_checkpoints_count(account: Front, checks: Checks) -> None:
    other = "demo-261120-101500-1a2b3c"
    place = f"cloudtrain/{other}/checkpoints"
    save(7, place=place, run="somebody-else")
    assert "no complete checkpoint" in only_failure(checks(f"checkpoint.resume={other}"), "checkpoints").detail
    save(5, place=place, run=other)
    assert f"from step 5 of run {other}" in checks(f"checkpoint.resume={other}")["checkpoints"].detail


def test_a_script_that_saves_by_the_api(account: Front, checks: Checks) -> None:
    other = "demo-261120-101500-1a2b3c"
    save(7, place=f"cloudtrain/{other}/steps/checkpoints", run=other)
    found = checks(f"checkpoint.resume={other}", text=SCRIPT)["checkpoints"]
    assert (found.result, found.detail) == (
        Result.PASS,
        f"cloudtrain_runtime.checkpoint will resume from step 7 of run {other}",
    )
    put(f"cloudtrain/{other}/checkpoints/epoch-3.pt", b"1")
    assert "1 objects below" in checks(f"checkpoint.resume={other}", text=SCRIPT)["checkpoints"].detail
    one = f"checkpoint.resume=s3://cloudtrain-test/cloudtrain/{other}/steps/checkpoints/step-0000000"
    assert "from step 7" in checks(f"{one}7", text=SCRIPT)["checkpoints"].detail
    assert "step-00000008 to resume" in only_failure(checks(f"{one}8", text=SCRIPT), "checkpoints").detail


def test_a_script_that_resumes_a_run_without_checkpoints(account: Front, checks: Checks) -> None:
    resume = "checkpoint.resume=demo-261120-101500-1a2b3c"
    assert "no complete checkpoint" in only_failure(checks(resume, text=SCRIPT), "checkpoints").detail
    isolated = checks(
        resume, "cluster.network.isolation=true", "cluster.instances=1"
    )  # SageMaker copies the checkpoints of an isolated Task, as it does for a script
    assert "no complete checkpoint" in only_failure(isolated, "checkpoints").detail
    put("cloudtrain/demo-261120-101500-1a2b3c/checkpoints/epoch-3.pt", b"1")
    assert "1 objects" in checks(resume, text=SCRIPT)["checkpoints"].detail
    elsewhere = "checkpoint.resume=s3://cloudtrain-test/nothing-there"
    assert "no complete checkpoint" in only_failure(checks(elsewhere, text=SCRIPT), "checkpoints").detail


# ---------------------------------------------------------------- quota


def test_a_quota_of_zero(account: Front, checks: Checks) -> None:
    account.say("ListServiceQuotas", quotas({**ENOUGH, "ml.m5.xlarge for training job usage": 0}))
    failure = only_failure(checks(), "quota")
    assert failure.detail == "ml.m5.xlarge for training job usage: 0 in us-west-2, the job needs 2"
    assert re.fullmatch(
        r"aws service-quotas request-service-quota-increase --service-code sagemaker "
        r"--quota-code L-\w{8} --desired-value 2 --region us-west-2",
        failure.fix,
    )
    assert checks("cluster.spot=true")["quota"].result is Result.PASS


def test_the_default_quota_applies_without_another(account: Front, checks: Checks) -> None:
    account.say("ListServiceQuotas", quotas({}))
    assert checks()["quota"].result is Result.UNKNOWN
    account.say("ListAWSDefaultServiceQuotas", quotas({"ml.m5.xlarge for training job usage": 1}))
    assert "1 in us-west-2, the job needs 2" in only_failure(checks(), "quota").detail


def test_the_quota_of_every_preference_must_cover_the_job(account: Front, checks: Checks) -> None:
    text = JOB.replace("instance_type: ml.m5.xlarge", "prefer: [ml.m5.xlarge, ml.m5.2xlarge]")
    values = {**ENOUGH, "ml.m5.2xlarge for training job usage": 8}
    account.say("ListServiceQuotas", quotas(values))
    assert checks(text=text)["quota"].result is Result.PASS
    for name in ("ml.m5.xlarge", "ml.m5.2xlarge"):
        account.say("ListServiceQuotas", quotas({**values, f"{name} for training job usage": 1}))
        assert f"{name} for" in only_failure(checks(text=text), "quota").detail


def start_job(name: str, instances: int, **more: Any) -> None:
    client("sagemaker").create_training_job(
        TrainingJobName=name,
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn=f"arn:aws:iam::{ACCOUNT}:role/training",
        OutputDataConfig={"S3OutputPath": "s3://cloudtrain-test/x"},
        ResourceConfig={"InstanceType": "ml.m5.xlarge", "InstanceCount": instances, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 60},
        **more,
    )


def list_as_running(request: Request) -> Answer | None:
    """List two jobs as running, because in moto a job ends at once."""
    asked = json.loads(request.body)
    if asked.get("StatusEquals") != "InProgress":
        return Answer.json({"TrainingJobSummaries": []})
    summary = {"TrainingJobArn": f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:training-job/x", "CreationTime": 1.0}
    names = ("busy", "spot")
    jobs = [{**summary, "TrainingJobName": name, "TrainingJobStatus": "InProgress"} for name in names]
    return Answer.json({"TrainingJobSummaries": jobs})


def test_what_is_in_use_counts_by_kind(account: Front, checks: Checks) -> None:
    start_job("busy", 6)
    start_job("spot", 5, EnableManagedSpotTraining=True)
    account.rules["ListTrainingJobs"] = list_as_running
    assert "6 of 8 in use, the job needs 2" in checks()["quota"].detail
    failure = only_failure(checks("cluster.instances=3"), "quota")
    assert "aws sagemaker stop-training-job --training-job-name busy" in failure.fix
    assert "--desired-value 9" in failure.fix
    assert "5 of 8 in use" in checks("cluster.spot=true")["quota"].detail


def test_quota_is_checked_without_usage(account: Front, checks: Checks) -> None:
    account.say("ListTrainingJobs", Answer.denied())
    found = checks()
    assert found["quota"].result is Result.PASS
    assert "could not be counted" in found["quota"].detail


def test_a_warm_pool_without_quota(account: Front, checks: Checks) -> None:
    assert "warm pool" not in checks()
    assert checks("cluster.keep_alive=30m")["warm pool"].result is Result.PASS
    account.say("ListServiceQuotas", quotas({**ENOUGH, "ml.m5.xlarge for training warm pool usage": 0}))
    assert "would not be kept warm" in only_failure(checks("cluster.keep_alive=30m"), "warm pool").detail


def with_pools(*names: str) -> Callable[[Request], Answer | None]:
    """Return a rule for ListTrainingJobs that lists the warm pools of these jobs as available, and nothing else."""

    def answer(request: Request) -> Answer | None:
        asked = json.loads(request.body)
        summary = {"TrainingJobArn": f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:training-job/x", "CreationTime": 1.0}
        ended = {"TrainingJobStatus": "Completed", "WarmPoolStatus": {"Status": "Available"}}
        jobs = [{**summary, **ended, "TrainingJobName": name} for name in names]
        return Answer.json({"TrainingJobSummaries": jobs if "WarmPoolStatusEquals" in asked else []})

    return answer


def pool(name: str, **resources: Any) -> dict[str, Any]:
    cluster = {"InstanceType": "ml.m5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
    return {
        "TrainingJobName": name,
        "TrainingJobStatus": "Completed",
        "TrainingEndTime": time.time(),
        "RoleArn": f"arn:aws:iam::{ACCOUNT}:role/training",
        "ResourceConfig": {**cluster, "KeepAlivePeriodInSeconds": 600, **resources},
        "WarmPoolStatus": {"Status": "Available"},
    }


def describe(*pools: dict[str, Any]) -> Callable[[Request], Answer | None]:
    """Return a rule for DescribeTrainingJob."""
    known = {each["TrainingJobName"]: each for each in pools}
    return lambda request: Answer.json(known[json.loads(request.body)["TrainingJobName"]])


def test_warm_start_is_reported(account: Front, checks: Checks) -> None:
    assert "warm start" not in checks()
    found = checks("cluster.keep_alive=30m")["warm start"]
    assert (found.result, found.detail) == (Result.PASS, "no warm pool is available: the cluster starts cold")
    account.rules["ListTrainingJobs"] = with_pools("first", "second")
    account.rules["DescribeTrainingJob"] = describe(pool("first", VolumeSizeInGB=50), pool("second", InstanceCount=3))
    detail = checks("cluster.keep_alive=30m")["warm start"].detail
    assert detail.endswith("pool of first (the nearest of 2) differs in cluster.volume (50, the job has 30)")
    account.rules["DescribeTrainingJob"] = describe(pool("first", VolumeSizeInGB=50), pool("second"))
    detail = checks("cluster.keep_alive=30m")["warm start"].detail
    assert re.fullmatch(r"reuses the warm pool of second, kept until \d\d:\d\d UTC", detail)
    account.say("ListTrainingJobs", Answer.denied())
    assert checks("cluster.keep_alive=30m")["warm start"].result is Result.UNKNOWN


def test_a_reused_pool_does_not_count_towards_the_quota(account: Front, checks: Checks) -> None:
    account.say("ListServiceQuotas", quotas({**ENOUGH, "ml.m5.xlarge for training job usage": 3}))
    account.rules["ListTrainingJobs"] = with_pools("first", "second")
    account.rules["DescribeTrainingJob"] = describe(pool("first"), pool("second", InstanceCount=1, VolumeSizeInGB=1))
    assert "1 of 3 in use, the job needs 2" in checks("cluster.keep_alive=30m")["quota"].detail
    account.rules["DescribeTrainingJob"] = describe(pool("first"), pool("second"))
    assert "2 of 3 in use" in only_failure(checks("cluster.keep_alive=30m"), "quota").detail


def test_a_quota_without_permission_is_unknown(account: Front, checks: Checks) -> None:
    account.say("ListServiceQuotas", Answer.denied())
    found = checks()
    assert found["quota"].result is Result.UNKNOWN
    assert found["quota"].fix == "grant servicequotas:ListServiceQuotas to these credentials"


# ---------------------------------------------------------------- queue

QUEUE = {
    "jobQueueName": "ml",
    "jobQueueArn": f"arn:aws:batch:us-west-2:{ACCOUNT}:job-queue/ml",
    "state": "ENABLED",
    "status": "VALID",
    "priority": 1,
    "computeEnvironmentOrder": [],
    "serviceEnvironmentOrder": [{"order": 1, "serviceEnvironment": "env"}],
    "jobQueueType": "SAGEMAKER_TRAINING",
}
POLICY = {"schedulingPolicyArn": f"arn:aws:batch:us-west-2:{ACCOUNT}:scheduling-policy/p"}


def serve_queues(front: Front, queues: list[dict[str, Any]], unit: str = "NUM_INSTANCES") -> None:
    front.say("POST /v1/describejobqueues", Answer.json({"jobQueues": queues}))
    limits = [{"capacityUnit": unit, "maxCapacity": 2}]
    environment = {
        "serviceEnvironmentName": "env",
        "serviceEnvironmentArn": "env",
        "serviceEnvironmentType": "SAGEMAKER_TRAINING",
        "capacityLimits": limits,
    }
    front.say("POST /v1/describeserviceenvironments", Answer.json({"serviceEnvironments": [environment]}))


@pytest.mark.parametrize(
    ("queue", "changes", "detail"),
    [
        ("ml", {}, "ml accepts jobs, first in, first out"),
        ("{name: ml, priority: 3}", {}, "ml accepts jobs, first in, first out; the priority has no effect"),
        ("{name: ml, share: a}", POLICY, "ml accepts jobs, ordered by shares and priority"),
    ],
)
def test_a_queue_that_accepts_the_job(
    account: Front, checks: Checks, queue: str, changes: dict[str, Any], detail: str
) -> None:
    serve_queues(account, [{**QUEUE, **changes}])
    found = checks(f"cluster.queue={queue}")
    assert {name for name, each in found.items() if each.result is not Result.PASS} == set()
    assert found["queue"].detail == detail
    assert found["queue capacity"].detail == "ml has capacity for 2 instances, the job needs 2"


@pytest.mark.parametrize(
    ("queue", "changes", "detail"),
    [
        ("ml", {"jobQueueType": "ECS"}, "ml is of type ECS and accepts no training jobs"),
        ("ml", {"state": "DISABLED"}, "ml accepts no jobs: DISABLED, VALID"),
        ("ml", {"status": "INVALID", "statusReason": "broken"}, "ml accepts no jobs: ENABLED, INVALID broken"),
        ("ml", POLICY, "ml has a scheduling policy and accepts no job without a share"),
        ("{name: ml, share: a}", {}, "ml has no scheduling policy and accepts no job with a share"),
    ],
)
def test_a_queue_that_rejects_the_job(
    account: Front, checks: Checks, queue: str, changes: dict[str, Any], detail: str
) -> None:
    serve_queues(account, [{**QUEUE, **changes}])
    assert only_failure(checks(f"cluster.queue={queue}"), "queue").detail == detail


def test_a_queue_that_is_missing_or_too_small(account: Front, checks: Checks) -> None:
    assert not {"queue", "queue capacity"} & set(checks())
    assert not any("/v1/" in name for name in account.seen)
    serve_queues(account, [])
    found = checks("cluster.queue=ml")
    assert "there is no job queue ml in us-west-2" in only_failure(found, "queue").detail
    assert found["queue capacity"].result is Result.UNKNOWN
    serve_queues(account, [QUEUE])
    failure = only_failure(checks("cluster.queue=ml", "cluster.instances=3"), "queue capacity")
    assert failure.detail == "ml has capacity for 2 instances, the job needs 3"
    assert failure.fix.startswith("--instances 2")
    serve_queues(account, [QUEUE], unit="ml.m5.xlarge")
    assert checks("cluster.queue=ml")["queue capacity"].result is Result.UNKNOWN


def test_a_queue_without_permission_is_unknown(account: Front, checks: Checks) -> None:
    account.say("POST /v1/describejobqueues", Answer.denied())
    found = checks("cluster.queue=ml")
    assert found["queue"].result is found["queue capacity"].result is Result.UNKNOWN
    assert found["queue"].fix == "grant batch:DescribeJobQueues to these credentials"


def test_what_the_caller_and_the_role_need_for_a_queue(account: Front, checks: Checks) -> None:
    serve_queues(account, [QUEUE])
    account.rules["SimulatePrincipalPolicy"] = simulation({"batch:SubmitServiceJob": "implicitDeny"})
    failure = only_failure(checks("cluster.queue=ml"), "caller")
    assert f"batch:SubmitServiceJob on arn:aws:batch:us-west-2:{ACCOUNT}:job-queue/ml" in failure.detail
    account.rules["SimulatePrincipalPolicy"] = simulation({"logs:PutLogEvents": "implicitDeny"})
    assert ":log-stream:AWSBatchdemo-" in only_failure(checks("cluster.queue=ml"), "permissions").detail


# ---------------------------------------------------------------- image


def test_own_images(account: Front, checks: Checks) -> None:
    uri = f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/mine:1"
    own = f"cluster.image={uri}"
    assert "create-repository --repository-name mine" in only_failure(checks(own), "image").fix
    ecr = client("ecr")
    ecr.create_repository(repositoryName="mine")
    failure = only_failure(checks(own), "image")
    assert failure.detail == f"there is no image {uri}"
    assert "aws ecr list-images --registry-id 123456789012 --repository-name mine" in failure.fix
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": []}
    ecr.put_image(repositoryName="mine", imageManifest=json.dumps(manifest), imageTag="1")
    found = ecr.describe_images(repositoryName="mine")["imageDetails"][0]["imageDigest"]
    assert checks(own)["image"].detail == f"{uri} exists and is {found} now"
    pinned = uri.replace(":1", f"@{found}")
    assert checks(f"cluster.image={pinned}")["image"].detail == f"{pinned} exists"
    other = pinned.replace(found[-8:], "00000000")
    assert only_failure(checks(f"cluster.image={other}"), "image").detail == f"there is no image {other}"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/mine:1", "the image is in eu-west-1, but the job is in us-west-2"),
        ("public.ecr.aws/deep-learning/pytorch:2", "SageMaker pulls images from ECR only"),
    ],
)
def test_an_unusable_image_uri_is_rejected_by_the_plan(
    account: Front, checks: Checks, image: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        checks(f"cluster.image={image}")


def test_an_image_of_aws_is_looked_up_or_found_in_the_list(account: Front, checks: Checks) -> None:
    account.say("BatchGetImage", Answer.denied())
    assert "in AWS's list of 20" in checks()["image"].detail
    failures = [{"imageId": {"imageTag": "x"}, "failureCode": "ImageNotFound", "failureReason": "x"}]
    account.say("BatchGetImage", Answer.json({"images": [], "failures": failures}))
    assert "there is no image 763104351884.dkr" in only_failure(checks(), "image").detail


# ---------------------------------------------------------------- network


class Vpc:
    """A VPC in moto with a subnet and a security group; methods add what a test needs."""

    def __init__(self) -> None:
        self.ec2 = client("ec2")
        self.id = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnet = self.add_subnet("10.0.0.0/24")
        self.group = self.ec2.create_security_group(GroupName="training", Description="x", VpcId=self.id)["GroupId"]
        tables = self.ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [self.id]}])["RouteTables"]
        self.table = tables[0]["RouteTableId"]

    def add_subnet(self, block: str) -> str:
        return str(self.ec2.create_subnet(VpcId=self.id, CidrBlock=block)["Subnet"]["SubnetId"])

    def add_endpoint(self) -> None:
        self.ec2.create_vpc_endpoint(
            VpcId=self.id, ServiceName="com.amazonaws.us-west-2.s3", RouteTableIds=[self.table]
        )

    def allow_itself(self, *directions: str) -> None:
        rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self.group}]}]
        for direction in directions:
            getattr(self.ec2, f"authorize_security_group_{direction}")(GroupId=self.group, IpPermissions=rule)

    def override(self, *, subnet: str = "", group: str = "") -> str:
        return f"cluster.network={{subnets: [{subnet or self.subnet}], security_groups: [{group or self.group}]}}"


@pytest.fixture
def vpc(account: Front) -> Vpc:
    return Vpc()


def test_a_correct_network_passes(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    found = checks(vpc.override(), "cluster.instance_type=ml.p4d.24xlarge")
    assert [str(found[name].result) for name in ("subnets", "security groups", "way to s3")] == ["pass"] * 3
    assert "251 free addresses in 1 subnet of vpc-" in found["subnets"].detail
    assert "the job needs 10" in found["subnets"].detail
    assert "gateway endpoint" in found["way to s3"].detail


def test_a_subnet_and_a_group_that_are_missing(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    failure = only_failure(checks(vpc.override(subnet="subnet-00000009")), "subnets")
    assert "subnet-00000009" in failure.detail
    assert "aws ec2 describe-subnets" in failure.fix
    failure = only_failure(checks(vpc.override(group="sg-00000009")), "security groups")
    assert "aws ec2 describe-security-groups" in failure.fix


def test_a_group_without_reference_to_itself(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    efa = (vpc.override(), "cluster.instance_type=ml.p4d.24xlarge")
    fix = only_failure(checks(*efa), "security groups").fix
    assert fix.count(" && ") == 1
    assert f"authorize-security-group-ingress --group-id {vpc.group}" in fix
    assert f"IpProtocol=-1,UserIdGroupPairs=[{{GroupId={vpc.group}}}]" in fix
    vpc.allow_itself("ingress")
    # EFA needs a rule for the group itself. Without EFA, the default rule for outbound traffic is enough.
    assert "egress" in only_failure(checks(*efa), "security groups").fix
    assert checks(vpc.override())["security groups"].result is Result.PASS
    assert checks(*efa, "cluster.instances=1")["security groups"].result is Result.PASS
    vpc.allow_itself("egress")
    assert checks(*efa)["security groups"].result is Result.PASS


def test_a_group_of_another_network(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    assert "not in the subnets' VPC" in only_failure(checks(vpc.override(group=Vpc().group)), "security groups").detail


def test_too_few_addresses(vpc: Vpc, checks: Checks) -> None:
    vpc.add_endpoint()
    vpc.allow_itself("ingress", "egress")
    small = vpc.add_subnet("10.0.9.0/28")  # 11 free: AWS keeps five
    found = checks(vpc.override(subnet=small), "cluster.instances=6")
    assert "11 free addresses in 1 subnet" in only_failure(found, "subnets").detail


def test_no_route_to_s3(vpc: Vpc, checks: Checks) -> None:
    vpc.allow_itself("ingress", "egress")
    fix = only_failure(checks(vpc.override()), "way to s3").fix
    words = shlex.split(fix)
    assert words[:3] == ["aws", "ec2", "create-vpc-endpoint"]
    assert words[words.index("--route-table-ids") + 1] == vpc.table
    gateway = vpc.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    vpc.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc.id)
    vpc.ec2.create_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    assert checks(vpc.override())["way to s3"].result is Result.UNKNOWN
    vpc.ec2.delete_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0")
    nat = vpc.ec2.create_nat_gateway(SubnetId=vpc.subnet)["NatGateway"]["NatGatewayId"]
    vpc.ec2.create_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
    assert "by NAT gateway" in checks(vpc.override())["way to s3"].detail


# ---------------------------------------------------------------- budget


def budget(limit: float, spent: float, **more: Any) -> dict[str, Any]:
    return {
        "BudgetName": "training",
        "BudgetLimit": {"Amount": str(limit), "Unit": "USD"},
        "TimeUnit": "MONTHLY",
        "BudgetType": "COST",
        "CalculatedSpend": {"ActualSpend": {"Amount": str(spent), "Unit": "USD"}},
        **more,
    }


@pytest.mark.parametrize(
    ("found", "result", "text"),
    [
        (budget(1000, 10), "pass", "990.00 of 1,000.00 USD monthly left"),
        (budget(100, 95), "fail", 'limits.cost=5 USD"'),
        (budget(100, 120), "fail", "wait, or raise it"),
        (budget(100, 95, CostFilters={"Service": ["Amazon SageMaker"]}), "fail", "limits.cost=5 USD"),
        (budget(100, 95, CostFilters={"Service": ["Amazon Elastic Compute Cloud - Compute"]}), "pass", "no budget"),
        (budget(100, 95, CostFilters={"TagKeyValue": ["user:team$vision"]}), "pass", "no budget"),
    ],
)
def test_budgets(account: Front, checks: Checks, found: dict[str, Any], result: str, text: str) -> None:
    account.say("DescribeBudgets", Answer.json({"Budgets": [found]}))
    # 2 x 0.23 USD per hour for 24 hours and 2 minutes are an estimated 11.06 USD.
    check = checks()["budget"]
    assert check.result == result
    assert text in check.detail + check.fix


# ---------------------------------------------------------------- all together


def test_all_checks_run_in_parallel(account: Front, checks: Checks) -> None:
    """The first eight requests are answered together. Sequential requests would time out."""
    account.meeting = threading.Barrier(8, action=lambda: setattr(account, "meeting", None), timeout=60)
    found = checks()
    assert {each.result for each in found.values()} == {Result.PASS}


def test_checks_without_an_answer_in_time_are_unknown(account: Front, job: Callable[..., Path], checks: Checks) -> None:
    import boto3

    checks()  # moto loads a service at the first request, which takes seconds
    open_again = threading.Event()
    account.rules["DescribeBudgets"] = lambda request: open_again.wait(60) and None
    settings = cloudtrain.find_settings()
    plan = cloudtrain.plan(job(SCRIPT, train_py=""), settings=settings)
    found = {each.name: each for each in run_checks(plan, settings, boto3.Session(), seconds=8)}
    open_again.set()
    assert found["budget"] == Check("budget", Result.UNKNOWN, "did not answer in 8 s", "try again")
    assert {each.result for name, each in found.items() if name != "budget"} == {Result.PASS}


def test_an_unexpected_response_hides_no_other_check(account: Front, checks: Checks) -> None:
    account.say("DescribeBudgets", Answer.json({"Budgets": [budget(1, 1, BudgetLimit={"Unit": "USD"})]}))
    found = checks()
    assert found["budget"].result is Result.UNKNOWN
    assert "a bug in cloudtrain: KeyError" in found["budget"].detail
    assert {each.result for name, each in found.items() if name != "budget"} == {Result.PASS}


def test_an_account_that_cannot_be_reached(
    aws: dict[str, str], checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    found = checks()
    assert {each.result for name, each in found.items() if name != "network"} == {Result.UNKNOWN}
    assert "AWS_ENDPOINT_URL" in found["role"].fix


# ---------------------------------------------------------------- the command


def test_the_command_prints_each_check_and_its_fix(account: Front, cli: Cli) -> None:
    account.say("ListServiceQuotas", quotas({**ENOUGH, "ml.p4d.24xlarge for training job usage": 0}))
    done = cli("check", EXAMPLES / "digits" / "job.yaml", "--instances", "2")
    assert done.code == 3
    lines = done.out.splitlines()
    assert lines[0].startswith("pass             identity     arn:aws:")
    failure = next(index for index, line in enumerate(lines) if line.startswith("fail"))
    assert lines[failure].split()[1:3] == ["quota", "ml.p4d.24xlarge"]
    assert lines[failure + 1].strip().startswith("fix: aws service-quotas request-service-quota-increase")
    assert lines[-1] == "12 checks: 11 passed, 1 failed"
    as_json = cli("check", EXAMPLES / "digits" / "job.yaml", "--instances", "2", "--json")
    assert as_json.code == 3
    assert [set(each) for each in as_json.json["checks"]] == [{"name", "result", "detail", "fix", "warning"}] * 12
    assert {each["result"] for each in as_json.json["checks"]} == {"pass", "fail"}


def test_unknown_checks_are_no_failure(aws: dict[str, str], cli: Cli) -> None:
    done = cli("check", EXAMPLES / "digits" / "job.yaml")
    assert done.code == 0
    assert "could not check  quota" in done.out


def test_submit_refuses_before_anything_is_uploaded(account: Front, cli: Cli) -> None:
    account.say("ListServiceQuotas", quotas({**ENOUGH, "ml.p4d.24xlarge for training job usage": 0}))
    job = EXAMPLES / "digits" / "job.yaml"
    account.seen.clear()
    done = cli("submit", job)
    assert done.code == 3
    assert "quota: ml.p4d.24xlarge for training job usage: 0 in us-west-2" in done.err
    assert "fix: aws service-quotas" in done.err
    assert "--skip-check" in done.err
    assert not [name for name in account.seen if name.startswith("PUT ") or name == "CreateTrainingJob"]
    done = cli("submit", job, "--skip-check", environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    assert "CreateTrainingJob" in account.seen


def test_submit_reports_unknown_checks(aws: dict[str, str], cli: Cli) -> None:
    done = cli("submit", EXAMPLES / "digits" / "job.yaml", environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    assert "could not check: caller, permissions, quota (why: " in done.err


def test_every_write_of_a_submit_names_the_buckets_owner(account: Front, cli: Cli, job: Callable[..., Path]) -> None:
    path = job(SCRIPT + "data: {train: numbers}\n", train_py="")
    (path.parent / "numbers").mkdir()
    (path.parent / "numbers" / "one").write_text("1")
    account.requests.clear()
    done = cli("submit", path, environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    owners = [
        r.headers.get("x-amz-expected-bucket-owner") for r in account.requests if "/cloudtrain-test" in r.operation
    ]
    assert len([r for r in account.requests if r.operation.startswith("PUT /cloudtrain-test/")]) == 5
    assert set(owners) == {ACCOUNT}


def test_the_images_digest_is_stored_with_the_plan(account: Front, cli: Cli, job: Callable[..., Path]) -> None:
    ecr = client("ecr")
    ecr.create_repository(repositoryName="mine")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": []}
    ecr.put_image(repositoryName="mine", imageManifest=json.dumps(manifest), imageTag="1")
    digest = ecr.describe_images(repositoryName="mine")["imageDetails"][0]["imageDigest"]
    image = f"cluster.image={ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/mine:1"
    path = job(SCRIPT, train_py="")
    done = cli("submit", path, "--set", image, "--json", environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    key = f"cloudtrain/{done.json['run']}/plan.json"
    plan = json.loads(client("s3").get_object(Bucket="cloudtrain-test", Key=key)["Body"].read())
    (found,) = (check for check in plan["checks"] if check["name"] == "image")
    assert found["detail"].endswith(f"mine:1 exists and is {digest} now")


def test_account_page_names_every_action() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "account.md").read_text()
    for action in ACTIONS.values():
        assert f"`{action}`" in page, action


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({"AWS_PROFILE": "nope"}, 3),
        ({"AWS_SECRET_ACCESS_KEY": ""}, 3),
        ({"AWS_ENDPOINT_URL": "foo"}, 3),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, 3),
    ],
)
def test_broken_configuration_is_reported_without_traceback(
    account: Front, cli: Cli, environ: dict[str, str], code: int
) -> None:
    done = cli("check", EXAMPLES / "digits" / "job.yaml", environ=environ)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert "bug" not in done.out + done.err
