"""The check of a job's secrets, over HTTP: whether they exist, and whether the role may read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.aws_frontend import Answer, Front, simulation

import cloudtrain
from cloudtrain.support.checks import Check, Result

pytestmark = pytest.mark.aws

JOB = """\
name: demo
code:
  script: train.py
  env: {WANDB_API_KEY: {secret: team/wandb, key: api_key}, AGAIN: {secret: team/wandb}}
cluster: {instance_type: ml.m5.xlarge}
"""
VALUE = "correct-horse-battery-staple"


@pytest.fixture
def front(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.rules["SimulatePrincipalPolicy"] = simulation()
        yield front


@pytest.fixture
def check(job: Callable[..., Path]) -> Callable[..., Check]:
    """Return a function that checks the job with overrides and returns the check of its secrets."""

    def run_check(*overrides: str) -> Check:
        found = cloudtrain.check(cloudtrain.validate(job(JOB, train_py=""), overrides))
        (check,) = [each for each in found if each.name == "secrets"]
        return check

    return run_check


def store(**fields: Any) -> None:
    import boto3

    boto3.client("secretsmanager").create_secret(Name="team/wandb", SecretString=VALUE, **fields)


def test_a_secret_that_the_role_may_read_passes_and_is_not_read(
    front: Front, check: Callable[..., Check]
) -> None:
    store()
    front.seen.clear()
    found = check()
    assert (found.result, found.detail) == (Result.PASS, "the role may read the secret")
    assert front.seen.count("DescribeSecret") == 1
    assert "GetSecretValue" not in front.seen


@pytest.mark.usefixtures("front")
def test_missing_secret_fails_with_the_command_to_create_it(check: Callable[..., Check]) -> None:
    found = check()
    assert found.result is Result.FAIL
    assert (
        found.detail == "AGAIN: there is no secret team/wandb in us-west-2"
    )  # the first variable that names it
    assert found.fix.startswith(
        "aws secretsmanager create-secret --region us-west-2 --name team/wandb --secret-string"
    )
    store()
    assert (
        "no version with the stage OLD"
        in check("code.env.AGAIN={secret: team/wandb, stage: OLD}").detail
    )


def test_a_role_that_may_not_read_it_fails_with_the_grant(
    front: Front, check: Callable[..., Check]
) -> None:
    store(KmsKeyId="arn:aws:kms:us-west-2:123456789012:key/12345678-1234-1234-1234-123456789012")
    front.rules["SimulatePrincipalPolicy"] = simulation(
        {"secretsmanager:GetSecretValue": "explicitDeny", "kms:Decrypt": "implicitDeny"}
    )
    found = check()
    assert found.result is Result.FAIL
    assert (
        "not allowed: secretsmanager:GetSecretValue on arn:aws:secretsmanager:us-west-2:"
        in found.detail
    )
    front.rules["SimulatePrincipalPolicy"] = simulation(
        {"secretsmanager:GetSecretValue": "implicitDeny"}
    )
    found = check()
    assert found.result is Result.UNKNOWN  # a policy of the secret may allow it
    assert '"Action": ["secretsmanager:GetSecretValue"]' in found.fix


def test_the_permission_that_the_check_lacks_is_reported(
    front: Front, check: Callable[..., Check]
) -> None:
    front.respond("DescribeSecret", Answer.denied())
    found = check()
    assert found.result is Result.UNKNOWN
    assert found.detail == "these credentials lack the permission secretsmanager:DescribeSecret"


@pytest.mark.usefixtures("front")
def test_a_job_without_secrets_has_no_such_check(job: Callable[..., Path]) -> None:
    found = cloudtrain.check(cloudtrain.validate(job(JOB, train_py=""), ["code.env={}"]))
    assert "secrets" not in {each.name for each in found}
