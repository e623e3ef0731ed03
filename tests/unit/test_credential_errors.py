"""What is wrong with credentials, region and clock: one table for every command and for `check`."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, TokenRetrievalError, UnauthorizedSSOTokenError
from botocore.session import Session

from cloudtrain.aws.errors import aws_errors
from cloudtrain.errors import CloudError, CredentialsError, SettingsError, UnreachableError
from cloudtrain.preflight.base import describe_error
from cloudtrain.settings.settings import find_origins, load_settings

SSO = "sso_start_url = https://x.awsapps.com/start\nsso_region = eu-west-1\n"
ROLE = "sso_account_id = 123456789012\nsso_role_name = x\n"
SESSION = f"[sso-session corp]\n{SSO}"
ASSUMED = "role_arn = arn:aws:iam::123456789012:role/x\n"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_A", "AWS_SE", "AWS_PRO"))]:
        monkeypatch.delenv(name)


def config_file() -> Path:
    return Path(os.environ["AWS_CONFIG_FILE"])


def credentials_file() -> Path:
    return Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])


def sign() -> None:
    """Sign a request as each command does; nothing is sent."""
    client = Session().create_client("sts", region_name="us-west-2")
    client.generate_presigned_url("get_caller_identity")


def error_of(action: Any = sign) -> CloudError:
    with pytest.raises(CloudError) as caught, aws_errors("list training jobs"):
        action()
    return caught.value


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        (
            f"[profile dev]\nsso_session = corp\n{ROLE}{SESSION}",
            "profile dev is not signed in to AWS SSO",
            "aws sso login --profile dev",
        ),
        (
            f"[profile dev]\n{SSO}{ROLE}",
            "profile dev is not signed in to AWS SSO",
            "aws sso login --profile dev",
        ),
        (
            f"[profile dev]\n{ASSUMED}source_profile = base\n[profile base]\n{SSO}{ROLE}",
            "profile base is not signed in to AWS SSO",
            "aws sso login --profile base",
        ),
        (
            f"[profile dev]\nsso_session = corp\n{ROLE}",
            'sso-session does not exist: "corp"',
            "correct profile dev (CONFIG:2), or make it anew: aws configure sso --profile dev",
        ),
        (
            f"[profile dev]\nsso_session = corp\n{SESSION}",
            "profile dev (CONFIG:2) lacks sso_account_id and sso_role_name",
            "aws configure sso --profile dev",
        ),
        (
            "[profile dve]\nregion = eu-west-1\n",
            'AWS_PROFILE: there is no profile "dev" in CONFIG or CREDENTIALS',
            'did you mean "dve"?; to make it: aws configure --profile dev',
        ),
        ("[profile dev\nregion = eu-west-1\n", "CONFIG:1: a value before", "correct this line"),
        ("[profile dev]\nregion eu-west-1\n", "CONFIG:2: neither [section]", "correct this line"),
        (
            "[profile dev]\nregion = a\nregion = b\n",
            "CONFIG:3: region is there twice in [profile dev]",
            "correct this line",
        ),
        (
            "[profile dev]\n\n[profile dev]\n",
            "CONFIG:3: [profile dev] is there twice",
            "correct this line",
        ),
        (
            "[profile dev]\nregion = a\ns3 =\n  fast\n",
            "CONFIG:3: the block below s3 has a line without key = value",
            "correct this line",
        ),
        (
            "[profile dev]\naws_access_key_id = x\n",
            "profile dev has a part of its credentials, and lacks aws_secret_access_key",
            "add aws_secret_access_key to profile dev (CONFIG:2)",
        ),
        (
            f"[profile dev]\n{ASSUMED}source_profile = base\n",
            'source_profile "base" referenced in the profile "dev" does not exist',
            "correct profile dev (CONFIG:2)",
        ),
        (
            f"[profile dev]\n{ASSUMED}web_identity_token_file = /none\n",
            "a web identity, from profile dev of AWS: /none: No such file or directory",
            "correct profile dev (CONFIG:2)",
        ),
        (
            "[profile dev]\nregion = eu-west-1\n",
            "there are no AWS credentials: profile dev (CONFIG:2) has none",
            "sign in (aws configure --profile dev), or choose another profile: AWS_PROFILE",
        ),
        (
            "[profile dev]\nregion = eu-west-1\ncredential_process = /none/program\n",
            "the credential_process of profile dev (CONFIG:3) failed: /none/program: No such file",
            "run that program by hand",
        ),
    ],
)
def test_each_mistake_names_its_place_and_its_fix(
    config: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file().write_text(config)
    monkeypatch.setenv("AWS_PROFILE", "dev")
    error = error_of()
    where = {"CONFIG": config_file(), "CREDENTIALS": credentials_file()}
    for name, path in where.items():
        message, hint = message.replace(name, str(path)), hint.replace(name, str(path))
    assert message in error.message
    assert error.message.startswith("could not list training jobs: ")
    assert hint in error.hint
    with pytest.raises(Exception) as raw:  # noqa: PT011 (whatever botocore raises)
        sign()
    described = describe_error(raw.value)
    assert described[1] == error.hint, "a check and a command give one advice"


def test_a_damaged_credentials_file_is_named() -> None:
    credentials_file().write_bytes(b"[default]\nregion = \xff\xfe\n")
    assert f"{credentials_file()}:2: not UTF-8 text" in error_of().message


def test_without_any_configuration_nothing_is_blamed() -> None:
    error = error_of()
    assert error.message.endswith("there are no AWS credentials")
    assert "aws configure, aws sso login, or AWS_PROFILE" in error.hint


def test_half_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    assert error_of().hint == (
        "export AWS_SECRET_ACCESS_KEY, or unset AWS_ACCESS_KEY_ID to use a profile"
    )


def test_a_missing_region_says_how_to_set_it() -> None:
    error = error_of(lambda: Session().create_client("sagemaker"))
    assert "no AWS region is set" in error.message
    assert "CLOUDTRAIN_REGION" in error.hint


@pytest.mark.parametrize(
    "raised",
    [
        UnauthorizedSSOTokenError(),
        TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"),
    ],
    ids=["unauthorized", "refresh failed"],
)
def test_an_expired_sso_session(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file().write_text(f"[profile my dev]\n{SSO}{ROLE}")
    monkeypatch.setenv("AWS_PROFILE", "my dev")

    def fail() -> None:
        raise raised

    error = error_of(fail)
    assert isinstance(error, CredentialsError)
    assert "expired" in error.message
    assert error.hint == "aws sso login --profile 'my dev'"


def rejection(code: str, text: str = "", seconds: int | None = 0) -> ClientError:
    """Return AWS's rejection, whose clock is that many seconds after this machine's."""
    headers = {}
    if seconds is not None:
        headers["date"] = format_datetime(
            datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True
        )
    response: Any = {
        "Error": {"Code": code, "Message": text},
        "ResponseMetadata": {"HTTPHeaders": headers, "HTTPStatusCode": 403},
    }
    return ClientError(response, "ListTrainingJobs")


def rejected(*arguments: Any) -> CloudError:
    def fail() -> None:
        raise rejection(*arguments)

    return error_of(fail)


KEYS = "aws_access_key_id = a\naws_secret_access_key = b\n"


@pytest.mark.parametrize(
    ("config", "code", "hint"),
    [
        (f"[profile dev]\n{SSO}{ROLE}", "ExpiredTokenException", "aws sso login --profile dev"),
        (
            f"[profile dev]\n{ASSUMED}source_profile = base\n[profile base]\nlogin_session = x\n",
            "ExpiredToken",
            "aws login --profile base",
        ),
        (
            f"[profile dev]\n{KEYS}aws_session_token = c\n",
            "ExpiredToken",
            "renew the access key, secret key and session token of profile dev (CONFIG:4)",
        ),
        (
            f"[profile dev]\n{KEYS}",
            "UnrecognizedClientException",
            "correct the access key of profile dev: aws configure --profile dev",
        ),
        (
            f"[profile dev]\n{KEYS}",
            "SignatureDoesNotMatch",
            "correct the secret key of profile dev: aws configure --profile dev",
        ),
        (
            "[profile dev]\ncredential_process = x\n",
            "ExpiredToken",
            "sign in again where the credential_process of profile dev (CONFIG:2) needs it",
        ),
    ],
)
def test_rejected_credentials_are_renewed_at_their_source(
    config: str, code: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file().write_text(config)
    monkeypatch.setenv("AWS_PROFILE", "dev")
    error = rejected(code)
    assert isinstance(error, CredentialsError)
    assert error.hint == hint.replace("CONFIG", str(config_file()))
    assert describe_error(rejection(code))[1] == error.hint


def test_variables_come_before_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    config_file().write_text(f"[profile dev]\n{SSO}{ROLE}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_PROFILE", "dev")
    assert rejected("ExpiredToken").hint == (
        "export new values of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, "
        "or unset the three to use profile dev"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("InvalidSignatureException", "Signature not yet current: 1 is still later than 2"),
        ("SignatureDoesNotMatch", "Signature expired: 1 is now earlier than 2"),
        ("RequestTimeTooSkewed", "The difference between the times is too large."),
        ("RequestExpired", "Request has expired."),
    ],
)
def test_a_wrong_clock_is_measured(code: str, text: str) -> None:
    error = rejected(code, text, 1230)
    assert isinstance(error, UnreachableError)
    assert "this machine's clock is 20m" in error.message
    assert "timedatectl" in error.hint


def test_a_right_clock_is_not_blamed() -> None:
    """The request was signed before a laptop slept, or EC2 means credentials that have expired."""
    assert "try again" in rejected("SignatureDoesNotMatch", "Signature expired: 1", 0).hint
    assert isinstance(rejected("RequestExpired", "Request has expired.", 0), CredentialsError)


def test_another_rejection_has_no_advice_on_credentials() -> None:
    error = rejected("ValidationException", "the name has expired")
    assert not isinstance(error, CredentialsError | UnreachableError)
    assert "AWS says ValidationException" in error.message


def test_an_error_of_a_file_is_no_error_of_credentials(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), aws_errors("download"):
        (tmp_path / "none").read_bytes()


# The region of the profile


def region_environ(**variables: str) -> dict[str, str]:
    names = ("HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
    return {**{name: os.environ[name] for name in names}, **variables}


def test_the_region_of_the_aws_profile_comes_last(tmp_path: Path) -> None:
    config_file().write_text("[default]\nregion = eu-west-1\n[profile dev]\nregion = eu-west-2\n")
    found = load_settings(region_environ(AWS_PROFILE="dev"))
    assert (found.region, found.sources["region"]) == ("eu-west-2", str(config_file()))
    assert load_settings(region_environ()).region == "eu-west-1"
    (tmp_path / "cloudtrain.toml").write_text("region = 'us-west-2'\n")
    beside = load_settings(region_environ(AWS_PROFILE="dev"), job_directory=tmp_path)
    assert beside.region == "us-west-2"
    (last,) = find_origins(region_environ(AWS_PROFILE="dev"))[-1:]
    assert (last.name, last.value, last.line) == ("region", "eu-west-2", 4)


def test_the_credentials_file_has_precedence_as_in_botocore() -> None:
    config_file().write_text("[profile dev]\nregion = eu-west-2\n")
    credentials_file().write_text("[dev]\nREGION = eu-west-3\n")
    assert load_settings(region_environ(AWS_PROFILE="dev")).region == "eu-west-3"
    os.environ["AWS_PROFILE"] = "dev"
    try:
        assert Session().get_config_variable("region") == "eu-west-3"
    finally:
        del os.environ["AWS_PROFILE"]


@pytest.mark.parametrize(
    "config", ["[profile dev\n", "region = x\n", "[dev]\nregion = x\n", "[profile 'dev\n"]
)
def test_a_file_without_a_usable_region_hinders_nothing(config: str) -> None:
    config_file().write_text(config)
    assert load_settings(region_environ(AWS_PROFILE="dev")).region is None
    with pytest.raises(SettingsError, match="region"):
        load_settings(region_environ(AWS_PROFILE="dev")).require()
