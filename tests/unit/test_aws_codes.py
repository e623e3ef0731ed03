"""Error codes of AWS: one table, and one meaning for every command, check, container and explanation."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from support.jobs import REPOSITORY

from cloudtrain.aws.errors import aws_errors
from cloudtrain.errors import CloudError, CredentialsError, UnreachableError
from cloudtrain.failure_rules import FailureClass, explain_run
from cloudtrain.preflight.base import describe_error, is_denied
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import SecretConfig, aws_codes
from cloudtrain_runtime.launcher.secrets import _refusal
from cloudtrain_runtime.s3.errors import S3Error, translate_errors

KINDS = {
    "denied": aws_codes.DENIED,
    "not accepted": aws_codes.NOT_ACCEPTED,
    "throttled": aws_codes.THROTTLED,
    "unavailable": aws_codes.UNAVAILABLE,
    "timed out": aws_codes.TIMED_OUT,
    "missing bucket": aws_codes.MISSING_BUCKET,
    "missing object": aws_codes.MISSING_OBJECT,
}
CODES = [(kind, code) for kind, codes in KINDS.items() for code in sorted(codes)]
IN_CONTAINER = {
    "denied": ("access is denied",),
    "not accepted": ("the credentials are wrong", "the credentials have expired"),
    "throttled": ("S3 throttled every attempt",),
    "unavailable": ("S3 failed on every attempt", "S3 throttled every attempt"),
    "timed out": ("the connection was lost",),
    "missing bucket": ("there is no such bucket",),
    "missing object": ("there is no such object",),
}
EXPLAINED = {
    "denied": FailureClass.S3_ACCESS,
    "not accepted": FailureClass.IAM,
    "throttled": FailureClass.S3_ACCESS,
    "missing bucket": FailureClass.S3_ACCESS,
    "missing object": FailureClass.S3_ACCESS,
}


def refused(code: str, operation: str = "GetObject") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, operation)


def command_error(code: str, operation: str = "GetObject") -> CloudError:
    with pytest.raises(CloudError) as caught, aws_errors("read the log"):
        raise refused(code, operation)
    return caught.value


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_a_command_and_a_check_give_one_advice(kind: str, code: str) -> None:
    error = command_error(code)
    assert describe_error(refused(code))[1] == error.hint
    assert is_denied(refused(code)) == (kind == "denied")
    assert isinstance(error, CredentialsError) == (kind == "not accepted")
    is_transient = kind in ("throttled", "unavailable", "timed out")
    assert isinstance(error, UnreachableError) == is_transient
    if kind == "denied":
        assert error.hint == "grant s3:GetObject to these credentials"
    if is_transient:
        assert error.hint == "try again in a minute"


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_the_container_knows_each_code_of_s3(kind: str, code: str) -> None:
    with pytest.raises(S3Error) as caught, translate_errors("reading s3://b/k"):
        raise refused(code)
    assert any(f"s3://b/k: {sentence}" in str(caught.value) for sentence in IN_CONTAINER[kind])


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_the_container_knows_each_code_of_a_secret(kind: str, code: str) -> None:
    reason = _refusal(refused(code, "GetSecretValue"), SecretConfig("token"), "us-west-2")
    assert ("secretsmanager:GetSecretValue" in reason) == (kind == "denied")
    assert ("does not accept the credentials" in reason) == (kind == "not accepted")


@pytest.mark.parametrize(("kind", "code"), [each for each in CODES if each[0] in EXPLAINED])
def test_a_job_that_ends_with_a_code_is_explained(kind: str, code: str) -> None:
    line = LogLine("algo-1", f"botocore.exceptions.ClientError: {refused(code)}")
    found = explain_run(Status("r", "sagemaker", State.FAILED), [line])
    assert found.failure is EXPLAINED[kind]


def test_no_code_has_two_meanings() -> None:
    for (one, first), (other, second) in itertools.combinations(KINDS.items(), 2):
        assert not first & second, (one, other)


def test_the_codes_are_in_one_table() -> None:
    # The sandbox writes codes as AWS does, and a number may be anything.
    codes = {code for _, code in CODES if not code.isdigit()} - {"NotFound"}
    codes |= aws_codes.CONDITION_NOT_MET | aws_codes.CONDITION_CONFLICT
    found = [
        f"{path.relative_to(REPOSITORY)}: {text}"
        for path in sources()
        for text in literals(path)
        if text in codes
    ]
    assert not found


def sources() -> Iterator[Path]:
    for folder in ("sdk", "entrypoints"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if "sandbox" not in path.parts and path.name != "aws_codes.py":
                yield path


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
