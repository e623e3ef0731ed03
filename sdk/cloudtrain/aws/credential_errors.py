"""Errors of what signs a request to AWS (credentials, region, clock): what is wrong, and what to do.

One table, which `aws_errors` and the checks of the account read.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.clock import CLOCK_FIX, aws_time, describe_skew
from cloudtrain.aws.credential_source import CredentialSource, find_credential_source
from cloudtrain.errors import CloudError, CredentialsError, UnreachableError, did_you_mean
from cloudtrain.settings.aws_profile import (
    Profiles,
    aws_files,
    find_mistake,
    find_profile_with,
    profile_name,
    read_profiles,
)
from cloudtrain_runtime.contract.aws_codes import (
    NOT_ACCEPTED,
    WRONG_SIGNATURE,
    WRONG_TIME,
    code_of,
)

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

_SSO_KEYS = ("sso_session", "sso_start_url")
_OWN_CREDENTIALS = (
    "aws_access_key_id",
    "credential_process",
    "credential_source",
    "login_session",
    "web_identity_token_file",
    *_SSO_KEYS,
)
"""Keys of a profile with credentials of its own: not those of a role that another profile assumes."""
_KEY_VARIABLES = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_MAX_AGREEING_SECONDS = 60
_MODULES_OF_CREDENTIALS = ("botocore.credentials", "botocore.tokens")


@dataclass(frozen=True)
class Problem:
    """Why a call of AWS has failed.

    Attributes:
        message: What is wrong, and where.
        hint: What to do; empty if unknown.
        kind: The error to raise. `UnreachableError`: the same call may succeed later without the user.
    """

    message: str
    hint: str
    kind: type[CloudError] = CredentialsError


def find_credential_problem(error: BaseException) -> Problem | None:
    """Return what is wrong with what signs requests, or None for an error with another cause."""
    from botocore.exceptions import BotoCoreError, ClientError

    if isinstance(error, ClientError):
        return _of_response(error)
    if isinstance(error, BotoCoreError):
        for kind in type(error).__mro__:
            if kind.__name__ in _BY_EXCEPTION:
                return _BY_EXCEPTION[kind.__name__](error)
        return _of_profile(error) if _rises_from_credentials(error) else None
    # What botocore does not catch: a missing program or token file, and output that is no JSON.
    if isinstance(error, OSError | ValueError | RuntimeError) and _rises_from_credentials(error):
        return _of_source(error)
    return None


def missing_credentials() -> Problem:
    """Return the problem of missing credentials, with what the chosen profile of AWS lacks."""
    profile = _profile()
    values = _profiles().get(profile, {})
    lacking = [key for key in ("sso_account_id", "sso_role_name") if key not in values]
    if lacking and any(key in values for key in _SSO_KEYS):
        return Problem(
            f"there are no AWS credentials: {_place_of(profile)} lacks {' and '.join(lacking)}",
            _command("aws configure sso", profile),
        )
    if values and profile != "default":
        return Problem(
            f"there are no AWS credentials: {_place_of(profile)} has none",
            f"sign in ({_command('aws configure', profile)}), or choose another profile: AWS_PROFILE",
        )
    return Problem(
        "there are no AWS credentials",
        "sign in (aws configure, aws sso login, or AWS_PROFILE). To run on this machine without an account: --local",
    )


def missing_region() -> Problem:
    """Return the problem of a missing region."""
    return Problem(
        "no AWS region is set",
        "export CLOUDTRAIN_REGION=..., such as us-west-2, or store it: cloudtrain configure",
        CloudError,
    )


# Exceptions of botocore, most of which come before a request


def _of_missing_profile(_: Any) -> Problem:
    config, credentials = aws_files(os.environ)
    known = sorted(_profiles())
    name = _profile()
    is_default = bool(os.environ.get("AWS_DEFAULT_PROFILE"))
    variable = "AWS_DEFAULT_PROFILE" if is_default else "AWS_PROFILE"
    otherwise = f"the profiles are {', '.join(known)}" if known else ""
    create = f"to make it: aws configure --profile {shlex.quote(name)}"
    near = did_you_mean(name, known, otherwise)
    return Problem(
        f'{variable}: there is no profile "{name}" in {config} or {credentials}',
        f"{near}; {create}" if near else create,
    )


def _of_malformed_file(error: Any) -> Problem:
    path = Path(str(error.kwargs.get("path", "")))
    return Problem(
        f"{find_mistake(path)} (a configuration file of AWS)",
        "correct this line: a file has sections such as [profile dev], and below them lines such as region = us-west-2",
    )


def _of_sso(error: Any) -> Problem:
    profile = find_profile_with(_profiles(), _profile(), _SSO_KEYS)
    reason = "is not signed in to AWS SSO"
    if type(error).__name__ != "SSOTokenLoadError":
        reason = "has an AWS SSO session that has expired"
    return Problem(f"profile {profile} {reason}", _command("aws sso login", profile))


def _of_login(error: Any) -> Problem:
    profile = find_profile_with(_profiles(), _profile(), ("login_session",))
    return Problem(f"profile {profile}: {_line(error)}", _command("aws login", profile))


def _of_profile(error: Any) -> Problem:
    """Return the problem of a profile whose values do not fit together."""
    name = _profile()
    if type(error).__name__ == "MissingDependencyException":
        return Problem(f"profile {name}: {_line(error)}", "pip install 'botocore[crt]'")
    profile = find_profile_with(_profiles(), name, _OWN_CREDENTIALS)
    fix = f"correct {_place_of(profile)}"
    if any(key in _profiles().get(profile, {}) for key in _SSO_KEYS):
        fix += f", or make it anew: {_command('aws configure sso', profile)}"
    return Problem(_line(error), fix)


def _of_incomplete(error: Any) -> Problem:
    missing = error.kwargs.get("cred_var", "")
    if error.kwargs.get("provider") == "env":
        return Problem(
            f"the environment has a part of the credentials, and lacks {missing}",
            f"export {missing}, or unset AWS_ACCESS_KEY_ID to use a profile",
        )
    profile = _profile()
    return Problem(
        f"profile {profile} has a part of its credentials, and lacks {missing}",
        f"add {missing} to {_place_of(profile)}",
    )


def _of_retrieval(error: Any) -> Problem:
    return _of_source(error, error.kwargs.get("error_msg", error))


def _of_source(error: BaseException, reason: object = None) -> Problem:
    """Return the problem of a source of credentials that fails: a program, a file with a token, a container."""
    name = _profile()
    profiles = _profiles()
    because = _line(reason or error)
    if isinstance(error, OSError) and error.filename:
        because = f"{error.filename}: {error.strerror}"
    profile = find_profile_with(profiles, name, ("credential_process",))
    program = profiles.get(profile, {}).get("credential_process")
    if program is not None and not os.environ.get("AWS_ACCESS_KEY_ID"):
        because = because or "it ended with an error and printed no reason"
        return Problem(
            f"the credential_process of profile {profile} ({program.place}) failed: {because}",
            "run that program by hand until it prints credentials, or choose another profile: AWS_PROFILE",
            UnreachableError,
        )
    source = _source()
    where = "the source of the credentials" if source is None else str(source)
    hint = "check AWS_PROFILE, or sign in again"
    if source is not None:
        hint = f"correct {source.variable or _place_of(str(source.profile))}"
    return Problem(f"{where}: {because}", hint, UnreachableError)


def _of_mfa(_: Any) -> Problem:
    return Problem(
        f"the credentials of profile {_profile()} have expired, and a new MFA code is needed",
        "run the command again: it asks for the code",
    )


_BY_EXCEPTION: Mapping[str, Callable[[Any], Problem]] = {
    "ProfileNotFound": _of_missing_profile,
    "ConfigParseError": _of_malformed_file,
    "SSOError": _of_sso,
    "TokenRetrievalError": _of_sso,
    "LoginError": _of_login,
    "NoCredentialsError": lambda _: missing_credentials(),
    "PartialCredentialsError": _of_incomplete,
    "CredentialRetrievalError": _of_retrieval,
    "RefreshWithMFAUnsupportedError": _of_mfa,
    "NoRegionError": lambda _: missing_region(),
}
"""Problem by the name of the exception: older versions of botocore lack some of them."""


# Responses of AWS

_OF_TIME = ("expired", "not yet current")


def _of_response(error: ClientError) -> Problem | None:
    code = code_of(error)
    text = str(error.response.get("Error", {}).get("Message", ""))
    is_late = code in WRONG_SIGNATURE and any(each in text.lower() for each in _OF_TIME)
    if code in WRONG_TIME or is_late:
        return _of_time(error, code, text)
    if code in NOT_ACCEPTED:
        return Problem(_rejected("credentials", code, text), _renew(code))
    if code == "ForbiddenException" and error.operation_name == "GetRoleCredentials":
        profile = find_profile_with(_profiles(), _profile(), _SSO_KEYS)
        return Problem(
            f"AWS SSO gives profile {profile} no access to its role: {code}: {text}",
            f"correct sso_account_id and sso_role_name of {_place_of(profile)}",
        )
    return None


def _rejected(what: str, code: str, text: str) -> str:
    reason = f"{code}: {_line(text)}" if text else code
    return f"AWS rejected the {what}: {reason}"


def _of_time(error: ClientError, code: str, text: str) -> Problem:
    """Return the problem of a rejected time. The response has AWS's time, which shows whether the clock is wrong."""
    message = _rejected("time of the request", code, text)
    there = aws_time(error.response)
    if there is None:
        return Problem(message, CLOCK_FIX, UnreachableError)
    here = time.time()
    if abs(here - there) > _MAX_AGREEING_SECONDS:
        return Problem(
            f"{message}; this machine's clock is {describe_skew(here, there)}",
            CLOCK_FIX,
            UnreachableError,
        )
    if code == "RequestExpired":
        # EC2 has this code for temporary credentials that have expired, too.
        return Problem(message, _renew(code))
    return Problem(
        message, "this machine's clock agrees with AWS's now: try again", UnreachableError
    )


def _renew(code: str) -> str:
    """Return how the user renews or corrects the credentials in use."""
    source = _source()
    if source is None:
        return "sign in again, or choose a profile: AWS_PROFILE"
    if source.variable == "AWS_ACCESS_KEY_ID":
        text = f"export new values of {_KEY_VARIABLES}"
        if _profile() not in _profiles():
            return text
        return f"{text}, or unset the three to use profile {_profile()}"
    if source.profile is None:
        return f"check {source.variable}"
    return _renew_profile(find_profile_with(_profiles(), source.profile, _OWN_CREDENTIALS), code)


def _renew_profile(profile: str, code: str) -> str:
    values = _profiles().get(profile, {})
    wrong = "secret key" if code in WRONG_SIGNATURE else "access key"
    if any(key in values for key in (*_SSO_KEYS, "login_session")):
        command = "aws login" if "login_session" in values else "aws sso login"
        return _command(command, profile)
    if token := values.get("aws_session_token"):
        return f"renew the access key, secret key and session token of profile {profile} ({token.place})"
    if "aws_access_key_id" in values:
        return f"correct the {wrong} of profile {profile}: {_command('aws configure', profile)}"
    program = values.get("credential_process")
    if program is not None:
        return f"sign in again where the credential_process of profile {profile} ({program.place}) needs it"
    return f"check {_place_of(profile)}"


def _source() -> CredentialSource | None:
    from botocore.exceptions import BotoCoreError

    try:
        return find_credential_source(os.environ)
    except BotoCoreError:
        return None


def _profile() -> str:
    return profile_name(os.environ)


def _profiles() -> Profiles:
    return read_profiles(os.environ)


def _place_of(profile: str) -> str:
    """Return a profile with the place of its first value, or the configuration file."""
    values = _profiles().get(profile, {}).values()
    place = next((each.place for each in values), str(aws_files(os.environ)[0]))
    return f"profile {profile} ({place})"


def _command(words: str, profile: str) -> str:
    if profile == "default":
        return words
    return f"{words} --profile {shlex.quote(profile)}"


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _rises_from_credentials(error: BaseException) -> bool:
    return any(
        module in _MODULES_OF_CREDENTIALS for module in _modules_of_traceback(error.__traceback__)
    )


def _modules_of_traceback(traceback: Any) -> Iterator[str]:
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
