"""Errors of what signs a request to AWS (credentials, region, clock): what is wrong, and what to do.

One table, which `aws_errors` and the checks of the account read.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.clock import CLOCK_FIX, aws_time, describe_skew
from cloudtrain.errors import CloudError, CredentialsError, UnreachableError, did_you_mean
from cloudtrain.settings.aws_profile import (
    aws_files,
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
_KEY_VARIABLES = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_MAX_AGREEING_SECONDS = 60
_MODULES_OF_CREDENTIALS = ("botocore.credentials", "botocore.tokens")
_OF_TIME = ("expired", "not yet current")


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
    # Also what botocore does not catch: a missing program or token file, and output that is no JSON.
    is_possible = isinstance(error, BotoCoreError | OSError | ValueError | RuntimeError)
    if is_possible and _rises_from_credentials(error):
        return _of_source(error)
    return None


def missing_credentials() -> Problem:
    """Return the problem of missing credentials."""
    profile = _profile()
    if profile in read_profiles(os.environ) and profile != "default":
        return Problem(
            f"there are no AWS credentials: profile {profile} has none",
            f"sign in ({_command('aws configure', profile)}, or {_command('aws configure sso', profile)}), or choose "
            "another profile: AWS_PROFILE",
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


def _of_missing_profile(_: Any) -> Problem:
    profile = _profile()
    known = sorted(read_profiles(os.environ))
    config, credentials = aws_files(os.environ)
    create = f"to make it: {_command('aws configure', profile)}"
    near = did_you_mean(profile, known, f"the profiles are {', '.join(known)}" if known else "")
    return Problem(
        f'AWS_PROFILE: there is no profile "{profile}" in {config} or {credentials}',
        f"{near}; {create}" if near else create,
    )


def _of_malformed_file(error: Any) -> Problem:
    place = str(error.kwargs.get("path", ""))
    cause = error.kwargs.get("error")
    wrong = getattr(cause, "errors", ())
    line = wrong[0][0] if wrong else getattr(cause, "lineno", None)
    if line is not None:
        place = f"{place}:{line}"
    return Problem(
        f"{place}: cannot be parsed (a configuration file of AWS)",
        "correct this line: a file has sections such as [profile dev], and below them lines such as region = us-west-2",
    )


def _of_sso(error: Any) -> Problem:
    source = find_profile_with(read_profiles(os.environ), _profile(), _SSO_KEYS)
    return Problem(f"profile {source}: {_line(error)}", _command("aws sso login", source))


def _of_login(error: Any) -> Problem:
    source = find_profile_with(read_profiles(os.environ), _profile(), ("login_session",))
    return Problem(f"profile {source}: {_line(error)}", _command("aws login", source))


def _of_incomplete(error: Any) -> Problem:
    missing = error.kwargs.get("cred_var", "")
    return Problem(_line(error), f"set {missing}, or choose another profile: AWS_PROFILE")


def _of_mfa(_: Any) -> Problem:
    return Problem(
        f"the credentials of profile {_profile()} have expired, and a new MFA code is needed",
        "run the command again: it asks for the code",
    )


def _of_source(error: BaseException) -> Problem:
    """Return the problem of a source of credentials that fails: a program, a file with a token, a container."""
    because = _line(error)
    if isinstance(error, OSError) and error.filename:
        because = f"{error.filename}: {error.strerror}"
    profile = _profile()
    return Problem(
        f"the source of the AWS credentials (profile {profile}) failed: {because}",
        f"correct profile {profile} in {aws_files(os.environ)[0]}, or choose another one: AWS_PROFILE",
        UnreachableError,
    )


_BY_EXCEPTION: Mapping[str, Callable[[Any], Problem]] = {
    "ProfileNotFound": _of_missing_profile,
    "ConfigParseError": _of_malformed_file,
    "SSOError": _of_sso,
    "TokenRetrievalError": _of_sso,
    "LoginError": _of_login,
    "NoCredentialsError": lambda _: missing_credentials(),
    "PartialCredentialsError": _of_incomplete,
    "CredentialRetrievalError": _of_source,
    "RefreshWithMFAUnsupportedError": _of_mfa,
    "NoRegionError": lambda _: missing_region(),
}
"""Problem by the name of the exception: older versions of botocore lack some of them."""


def _of_response(error: ClientError) -> Problem | None:
    code = code_of(error)
    text = str(error.response.get("Error", {}).get("Message", ""))
    is_late = code in WRONG_SIGNATURE and any(each in text.lower() for each in _OF_TIME)
    if code in WRONG_TIME or is_late:
        return _of_time(error, code, text)
    if code in NOT_ACCEPTED:
        return Problem(_rejected("credentials", code, text), _renew())
    return None


def _rejected(what: str, code: str, text: str) -> str:
    reason = f"{code}: {_line(text)}" if text else code
    return f"AWS rejected the {what}: {reason}"


def _of_time(error: ClientError, code: str, text: str) -> Problem:
    """Return the problem of a rejected time. The response has AWS's time, which shows whether the clock is wrong."""
    message = _rejected("time of the request", code, text)
    there = aws_time(error.response)
    here = time.time()
    if there is None:
        return Problem(message, CLOCK_FIX, UnreachableError)
    if abs(here - there) > _MAX_AGREEING_SECONDS:
        skew = f"{message}; this machine's clock is {describe_skew(here, there)}"
        return Problem(skew, CLOCK_FIX, UnreachableError)
    if code == "RequestExpired":
        # EC2 has this code for temporary credentials that have expired, too.
        return Problem(message, _renew())
    agrees = "this machine's clock agrees with AWS's now: try again"
    return Problem(message, agrees, UnreachableError)


def _renew() -> str:
    """Return how the user renews or corrects the credentials in use."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return f"export new values of {_KEY_VARIABLES}, or unset the three to use a profile"
    profiles = read_profiles(os.environ)
    sso = find_profile_with(profiles, _profile(), _SSO_KEYS)
    if any(key in profiles.get(sso, {}) for key in _SSO_KEYS):
        return _command("aws sso login", sso)
    return f"sign in again, or correct the keys: {_command('aws configure', _profile())}"


def _profile() -> str:
    return profile_name(os.environ)


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
