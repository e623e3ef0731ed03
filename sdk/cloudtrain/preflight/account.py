"""Roles and buckets of an account that can be settings, and checks of credentials, clock and settings without a job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cloudtrain.aws.clock import CLOCK_FIX, aws_time, describe_skew
from cloudtrain.aws.credential_errors import find_credential_problem
from cloudtrain.aws.errors import aws_errors, missing_credentials_error
from cloudtrain.aws.session import make_session
from cloudtrain.errors import CloudError
from cloudtrain.preflight import network, storage
from cloudtrain.preflight.base import (
    Account,
    CheckGroup,
    UnansweredError,
    bucket_region,
    describe_error,
    is_denied,
    map_concurrently,
)
from cloudtrain.preflight.role import check_role, evaluate_trust, job_context_keys
from cloudtrain.settings.settings import Settings
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.aws_codes import code_of

MAX_ROLES = 1000
MAX_BUCKETS = 100
"""Most roles and buckets that are examined; users with more must name theirs."""

_MAX_SKEW_SECONDS = 300
"""AWS rejects signatures that are older or newer. Source: IAM user guide, signing API requests, 2026-11."""
_WARN_SECONDS = 60

_SERVICE_ROLE_PATHS = ("/aws-service-role/", "/aws-reserved/")
_SERVICE_ROLE_DETAIL = "belongs to an AWS service"
_UNENCRYPTED_CODE = "ServerSideEncryptionConfigurationNotFoundError"


@dataclass(frozen=True)
class Candidate:
    """A role or a bucket of the account.

    Attributes:
        value: The role's ARN, the bucket's name.
        fits: Whether it can be the setting.
        detail: Why it does not fit, or details of one that fits; may be empty.
        kms_key: Customer managed KMS key that encrypts a bucket, or None.
    """

    value: str
    fits: bool
    detail: str = ""
    kms_key: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Candidates:
    """Candidates for one setting.

    Attributes:
        found: Candidates; those that fit come first.
        unanswered: Why some could not be examined, or an empty string.
        fix: How to make them visible.
    """

    found: tuple[Candidate, ...] = ()
    unanswered: str = ""
    fix: str = ""

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Candidates that fit."""
        return tuple(each for each in self.found if each.fits)


def open_account(settings: Settings) -> Account:
    """Return the account of the current credentials, with its known settings.

    Raises:
        CloudError: There are no credentials.
    """
    with aws_errors("find credentials"):
        session = make_session(region_name=settings.region)
        if session.get_credentials() is None:
            raise missing_credentials_error()
    return Account(settings, session)


def find_roles(account: Account) -> Candidates:
    """Return the account's roles; those that SageMaker may assume come first."""
    return _found(_roles(account))


def find_buckets(account: Account) -> Candidates:
    """Return the account's buckets; encrypted ones in the region come first."""
    return _found(_buckets(account))


def check_identity(context: Account) -> Iterator[Check]:
    """Check that AWS accepts the credentials and that they belong to the role's account."""
    try:
        caller = context.caller
    except Exception as error:
        if find_credential_problem(error) is None:
            raise
        yield failed("identity", *describe_error(error))
        return
    arn = caller["Arn"]
    account = caller["Account"]
    wanted = context.settings.account
    if wanted is not None and wanted != account:
        yield failed(
            "identity",
            f"signed in to account {account} as {arn}; the role belongs to account {wanted}, "
            "and a role cannot be passed to SageMaker from another account",
            f"sign in to account {wanted}, or set CLOUDTRAIN_ROLE to a role of account {account}",
        )
        return
    yield passed("identity", f"{arn}, account {account}")


def check_clock(context: Account) -> Iterator[Check]:
    """Compare this machine's clock with the Date header of a response. With a wrong clock AWS rejects every call."""
    from botocore.exceptions import ClientError

    before = time.time()
    try:
        answer = context.client("sts").get_caller_identity()
    except ClientError as error:
        # A rejection is an answer, too: its reason may be the clock.
        answer = error.response
    here = (before + time.time()) / 2
    there = aws_time(answer)
    if there is None:
        yield unknown("clock", "the response has no Date header")
        return
    skew = round(abs(here - there))
    # The header has whole seconds.
    if skew <= 1:
        yield passed("clock", "agrees with AWS's clock")
        return
    detail = describe_skew(here, there)
    if skew > _MAX_SKEW_SECONDS:
        limit = format_duration(_MAX_SKEW_SECONDS)
        yield failed(
            "clock", f"{detail}; AWS rejects requests that are more than {limit} off", CLOCK_FIX
        )
    else:
        yield passed(
            "clock",
            detail,
            warning=f"the clock is {detail}: {CLOCK_FIX}" if skew > _WARN_SECONDS else "",
        )


def check_settings(settings: Settings) -> tuple[Check, ...]:
    """Check settings against the account; checks without an answer are `unknown`."""
    if settings.region is None:
        return (unknown("identity", "the region is unknown", "give a region, too"),)
    try:
        account = open_account(settings)
    except CloudError as error:
        return (unknown("identity", error.message, error.hint),)
    groups = [CheckGroup(("identity",), check_identity)]
    if settings.role:
        groups.append(CheckGroup(("role", "trust"), check_role))
    if settings.bucket:
        groups.append(CheckGroup(("bucket",), storage.check_bucket))
    if settings.subnets:
        names = ("subnets", "security groups")
        groups.append(CheckGroup(names, network.check_network_settings))
    results = map_concurrently(lambda group: group.run(account), groups)
    return tuple(check for checks in results for check in checks)


def _found(candidates: Iterator[Candidate]) -> Candidates:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    found: list[Candidate] = []
    unanswered = fix = ""
    try:
        # extend() keeps the candidates before an error.
        found.extend(candidates)
    except (BotoCoreError, ClientError, ResponseParserError, UnansweredError, ValueError) as error:
        unanswered, fix = describe_error(error)
    found.sort(key=lambda each: (not each.fits, each.detail == _SERVICE_ROLE_DETAIL, each.value))
    return Candidates(tuple(found), unanswered, fix)


def _roles(account: Account) -> Iterator[Candidate]:
    caller = account.caller
    context_keys = job_context_keys(caller["Arn"].split(":")[1], caller["Account"], account.region)
    pages = (
        account.client("iam")
        .get_paginator("list_roles")
        .paginate(PaginationConfig={"MaxItems": MAX_ROLES})
    )
    for role in (role for page in pages for role in page["Roles"]):
        if role["Path"].startswith(_SERVICE_ROLE_PATHS):
            yield Candidate(role["Arn"], fits=False, detail=_SERVICE_ROLE_DETAIL)
        else:
            trusts, why = evaluate_trust(role["AssumeRolePolicyDocument"], context_keys)
            yield Candidate(role["Arn"], fits=trusts is not False, detail=why)
    if pages.resume_token is not None:
        raise UnansweredError(f"only {MAX_ROLES:,} roles were examined", "give the role's ARN")


def _buckets(account: Account) -> Iterator[Candidate]:
    owner = {"ExpectedBucketOwner": account.caller["Account"]}
    # ListBuckets returns regions only if MaxBuckets is given.
    listed = account.client("s3").list_buckets(MaxBuckets=1000)["Buckets"]
    elsewhere = [
        each for each in listed if each.get("BucketRegion", account.region) != account.region
    ]
    for each in elsewhere:
        yield _in_another_region(each["Name"], each["BucketRegion"], account.region)
    near = [each["Name"] for each in listed if each not in elsewhere]
    yield from map_concurrently(partial(_evaluate_bucket, account, owner), near[:MAX_BUCKETS])
    if len(near) > MAX_BUCKETS:
        raise UnansweredError(
            f"{len(near) - MAX_BUCKETS} more buckets were not examined", "give the bucket's name"
        )


def _in_another_region(name: str, region: str, wanted: str) -> Candidate:
    return Candidate(name, fits=False, detail=f"is in {region}, not in {wanted}")


def _evaluate_bucket(account: Account, owner: Mapping[str, str], name: str) -> Candidate:
    from botocore.exceptions import ClientError

    try:
        region = bucket_region(account, name, owner)
    except ClientError as error:
        why = "cannot be examined without the permission s3:ListBucket"
        if not is_denied(error):
            why = describe_error(error)[0]
        return Candidate(name, fits=False, detail=why)
    if region != account.region:
        return _in_another_region(name, region, account.region)
    try:
        answer = account.client("s3").get_bucket_encryption(Bucket=name, **owner)
    except ClientError as error:
        if code_of(error) == _UNENCRYPTED_CODE:
            return Candidate(name, fits=False, detail="has no default encryption")
        return Candidate(
            name, fits=True, detail=f"its encryption is unknown: {describe_error(error)[0]}"
        )
    rules = answer["ServerSideEncryptionConfiguration"]["Rules"]
    defaults = (rule.get("ApplyServerSideEncryptionByDefault") for rule in rules)
    default: Mapping[str, Any] = next((each for each in defaults if each is not None), {})
    key = default.get("KMSMasterKeyID")
    own = key if key and "alias/aws/" not in key else None
    how = f"its key {own}" if own else default.get("SSEAlgorithm", "AES256")
    return Candidate(name, fits=True, detail=f"encrypted with {how}", kms_key=own)
