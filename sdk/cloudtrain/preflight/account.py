"""What an account has for cloudtrain before there is a job: roles and buckets that fit, and whether settings are so."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cloudtrain.aws.errors import aws_errors, missing_credentials_error
from cloudtrain.errors import CloudError
from cloudtrain.preflight import caller, network, storage
from cloudtrain.preflight.base import (
    Account,
    Check,
    CheckGroup,
    UnansweredError,
    bucket_region,
    describe_error,
    error_code,
    is_denied,
    run_concurrently,
    unknown,
)
from cloudtrain.preflight.role import check_role, evaluate_trust, job_context_keys
from cloudtrain.settings.settings import Settings

MAX_ROLES = 1000
MAX_BUCKETS = 100
"""How many are asked for; who has more names them."""

_SERVICE_PATHS = ("/aws-service-role/", "/aws-reserved/")
_OF_A_SERVICE = "belongs to a service of AWS"
_UNENCRYPTED = "ServerSideEncryptionConfigurationNotFoundError"


@dataclass(frozen=True)
class Candidate:
    """A role or a bucket of the account.

    Attributes:
        value: The role's ARN, the bucket's name.
        fits: Whether it can be the setting.
        detail: Why it does not fit; of one that does what is to be known of it, or an empty text.
        kms_key: Of a bucket the key that encrypts what is put into it, if it is one of the account's own.
    """

    value: str
    fits: bool
    detail: str = ""
    kms_key: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return an object for programs."""
        return asdict(self)


@dataclass(frozen=True)
class Candidates:
    """What was found for one setting.

    Attributes:
        found: Those that fit first.
        unanswered: Why not all could be looked at, or an empty text.
        fix: What would let them be seen.
    """

    found: tuple[Candidate, ...] = ()
    unanswered: str = ""
    fix: str = ""

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Those that fit."""
        return tuple(each for each in self.found if each.fits)


def open_account(settings: Settings, session: Any = None) -> Account:
    """Return the account of the credentials at hand.

    Args:
        settings: Its settings as far as they are known, the region among them.
        session: A boto3 session; by default one from the environment.

    Raises:
        CloudError: there are no credentials.
    """
    import boto3

    with aws_errors("find credentials"):
        session = session or boto3.Session(region_name=settings.region)
        if session.get_credentials() is None:
            raise missing_credentials_error()
    return Account(settings, session)


def find_roles(account: Account) -> Candidates:
    """Return the account's roles, those first that SageMaker may assume."""
    return _found(_roles(account))


def find_buckets(account: Account) -> Candidates:
    """Return the account's buckets, those first that are in the region and encrypt what is put into them."""
    return _found(_buckets(account))


def check_settings(settings: Settings) -> tuple[Check, ...]:
    """Ask whether settings are what they seem, side by side; what cannot be asked is `unknown`."""
    if settings.region is None:
        return (unknown("identity", "no region is known to ask in", "give a region, too"),)
    try:
        account = open_account(settings)
    except CloudError as error:
        return (unknown("identity", error.message, error.hint),)
    asked = [CheckGroup(("identity",), caller.check_identity)]
    asked += [CheckGroup(("role", "trust"), check_role)] if settings.role else []
    asked += [CheckGroup(("bucket",), storage.check_bucket)] if settings.bucket else []
    asked += [CheckGroup(("subnets", "security groups"), network.check_network_settings)] if settings.subnets else []
    answers = run_concurrently([functools.partial(question.answer, account) for question in asked])
    return tuple(check for answer in answers for check in answer)


def _found(candidates: Iterator[Candidate]) -> Candidates:
    """Collect candidates until one cannot be had."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    found: list[Candidate] = []
    unanswered = fix = ""
    try:
        found.extend(candidates)  # what was answered before an error stays
    except (BotoCoreError, ClientError, ResponseParserError, UnansweredError, ValueError) as error:
        unanswered, fix = describe_error(error)
    found.sort(key=lambda each: (not each.fits, each.detail == _OF_A_SERVICE, each.value))
    return Candidates(tuple(found), unanswered, fix)


# ---------------------------------------------------------------- roles


def _roles(account: Account) -> Iterator[Candidate]:
    caller = account.caller
    facts = job_context_keys(caller["Arn"].split(":")[1], caller["Account"], account.region)
    pages = account.client("iam").get_paginator("list_roles").paginate(PaginationConfig={"MaxItems": MAX_ROLES})
    for page in pages:
        for role in page["Roles"]:
            yield _judge_role(role, facts)
    if pages.resume_token is not None:
        raise UnansweredError(f"only {MAX_ROLES:,} roles were looked at", "give the role's ARN")


def _judge_role(role: Mapping[str, Any], facts: Mapping[str, str]) -> Candidate:
    if role["Path"].startswith(_SERVICE_PATHS):
        return Candidate(role["Arn"], fits=False, detail=_OF_A_SERVICE)
    trusts, why = evaluate_trust(role["AssumeRolePolicyDocument"], facts)
    return Candidate(role["Arn"], fits=trusts is not False, detail=why)


# ---------------------------------------------------------------- buckets


def _buckets(account: Account) -> Iterator[Candidate]:
    owner = {"ExpectedBucketOwner": account.caller["Account"]}
    # Only an answer that may come in parts tells regions.
    listed = account.client("s3").list_buckets(MaxBuckets=1000)["Buckets"]
    elsewhere = [each for each in listed if each.get("BucketRegion", account.region) != account.region]
    for each in elsewhere:
        yield _in_another_region(each["Name"], each["BucketRegion"], account.region)
    near = [each["Name"] for each in listed if each not in elsewhere]
    yield from run_concurrently([functools.partial(_judge_bucket, account, name, owner) for name in near[:MAX_BUCKETS]])
    if len(near) > MAX_BUCKETS:
        raise UnansweredError(f"{len(near) - MAX_BUCKETS} more buckets were not looked at", "give the bucket's name")


def _in_another_region(name: str, region: str, wanted: str) -> Candidate:
    return Candidate(name, fits=False, detail=f"is in {region}, not in {wanted}")


def _judge_bucket(account: Account, name: str, owner: Mapping[str, str]) -> Candidate:
    from botocore.exceptions import ClientError

    try:
        region = bucket_region(account, name, owner)
    except ClientError as error:
        why = "may not be looked at: s3:ListBucket" if is_denied(error) else describe_error(error)[0]
        return Candidate(name, fits=False, detail=why)
    if region != account.region:
        return _in_another_region(name, region, account.region)
    try:
        answer = account.client("s3").get_bucket_encryption(Bucket=name, **owner)
    except ClientError as error:
        if error_code(error) == _UNENCRYPTED:
            return Candidate(name, fits=False, detail="does not encrypt what is put into it")
        return Candidate(name, fits=True, detail=f"its encryption is not known: {describe_error(error)[0]}")
    return _encrypted(name, answer["ServerSideEncryptionConfiguration"]["Rules"])


def _encrypted(name: str, rules: Sequence[Mapping[str, Any]]) -> Candidate:
    default: Mapping[str, str] = next(
        (rule["ApplyServerSideEncryptionByDefault"] for rule in rules if _DEFAULT in rule), {}
    )
    key = default.get("KMSMasterKeyID")
    own = key if key and "alias/aws/" not in key else None
    how = f"with its key {own}" if own else f"with {default.get('SSEAlgorithm', 'AES256')}"
    return Candidate(name, fits=True, detail=f"encrypted {how}", kms_key=own)


_DEFAULT = "ApplyServerSideEncryptionByDefault"
