"""Rules for the values of settings. AWS is not called.

Each rule returns message and hint for an invalid value, or None.
"""

from __future__ import annotations

import contextlib
import ipaddress

from cloudtrain.catalog import service_limits
from cloudtrain.errors import did_you_mean
from cloudtrain.secrets.values import is_random_secret
from cloudtrain.settings.settings import SWITCHES, TRANSPORTS
from cloudtrain.support.aws_names import BUCKET, ROLE_ARN, arn_pattern, parse_arn
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

Value = str | tuple[str, ...]
Wrong = tuple[str, str] | None

SIGN_IN = (
    "cloudtrain stores no secrets: sign in with aws sso login or aws configure, and set AWS_PROFILE"
)

_RESERVED_STARTS = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_ENDS = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
# Source: S3 user guide, general purpose bucket naming rules, 2026-11.
_PREFIX = lazy_pattern(r"[A-Za-z0-9][A-Za-z0-9._-]*(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)*")
_SUBNET = lazy_pattern(r"subnet-(?:[0-9a-f]{8}|[0-9a-f]{17})")
_GROUP = lazy_pattern(r"sg-(?:[0-9a-f]{8}|[0-9a-f]{17})")
_KEY_ID = r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32})"
_ALIAS = r"alias/[A-Za-z0-9/_-]{1,250}"
_KEY = lazy_pattern(f"{_KEY_ID}|{_ALIAS}|{arn_pattern('kms', f'(?:key/{_KEY_ID}|{_ALIAS})')}")
_FORMS = {
    "role": (ROLE_ARN, "ARN of a role", "such as arn:aws:iam::123456789012:role/training"),
    "kms_key": (
        _KEY,
        "KMS key",
        "give arn:aws:kms:us-west-2:123456789012:key/..., alias/NAME, or the key's id",
    ),
    "prefix": (
        _PREFIX,
        "prefix",
        "such as cloudtrain or team/cloudtrain: no slash at the ends, no wildcards",
    ),
}
_MEMBERS = {"subnets": "Subnets", "security_groups": "SecurityGroupIds"}


def find_value_error(name: str, value: Value, region: str | None = None) -> Wrong:
    """Return what is wrong with the value of a setting; `region` is that of the settings, if it is known."""
    texts = [value] if isinstance(value, str) else value
    if any(map(is_random_secret, texts)):
        return "looks like a secret, which is not repeated here", SIGN_IN
    if not isinstance(value, str):
        return _check_ids(name, value)
    if not value.isascii() or not value.isprintable():
        return "contains characters that are not allowed", "write it without them"
    if name in _FORMS and not _FORMS[name][0].fullmatch(value):
        _, kind, hint = _FORMS[name]
        return f'"{value}" is no {kind}', hint
    choices = {"transport": TRANSPORTS, **dict.fromkeys(SWITCHES, ("true", "false", "1", "0"))}.get(
        name, (value,)
    )
    if value not in choices:
        return f'"{value}" is unknown', did_you_mean(value, choices)
    return find_mismatch(name, value, region)


def find_mismatch(name: str, value: str, region: str | None) -> Wrong:
    """Return why a setting cannot work, whatever the account has: a role or key of another region, or a wrong name."""
    arn = parse_arn(value)
    if name == "bucket":
        return _check_bucket(value)
    if name == "region":
        return _check_region(value)
    if arn is None or not region:
        return None
    if name == "role":
        partition = service_limits.partition_of(region)
        if arn.partition != partition:
            message = f"a role of {arn.partition} does not work in {region}"
            return message, f"its ARN begins with arn:{partition}:"
    if name == "kms_key" and arn.region != region:
        return f"the key is in {arn.region}, but the region is {region}", f"use a key of {region}"
    return None


def find_unpaired(subnets: object, security_groups: object) -> tuple[str, str, str] | None:
    """Return setting, message and hint where only one of subnets and security groups is given."""
    if bool(subnets) == bool(security_groups):
        return None
    given = "subnets" if subnets else "security_groups"
    missing = "security_groups" if subnets else "subnets"
    return given, "subnets and security_groups go together", f"give {missing}, too, or neither"


def _check_region(value: str) -> Wrong:
    regions = service_limits.regions()
    if value in regions or service_limits.is_newer_region(value):
        return None
    hint = did_you_mean(value, regions, "for example us-west-2")
    return f'there is no AWS region "{value}"', hint


def _check_bucket(value: str) -> Wrong:
    if not BUCKET.fullmatch(value):
        message = f'expected a bucket name of 3 to 63 lowercase letters, digits, dots or hyphens, got "{value}"'
        hint = "for example my-bucket"
        if "://" in value:
            hint = f"give the name alone: {split_uri(value).bucket}"
        return message, hint
    is_address = False
    with contextlib.suppress(ValueError):
        is_address = bool(ipaddress.IPv4Address(value))
    is_reserved = value.startswith(_RESERVED_STARTS) or value.endswith(_RESERVED_ENDS)
    if is_address or is_reserved or ".." in value:
        return f'"{value}" is no name that S3 gives to a bucket', "give a general purpose bucket"
    return None


def _check_ids(name: str, value: tuple[str, ...]) -> Wrong:
    if name == "subnets":
        kind = "subnet"
        pattern = _SUBNET
        example = "subnet-0123456789abcdef0"
    else:
        kind = "security group"
        pattern = _GROUP
        example = "sg-0123456789abcdef0"
    wrong = [each for each in value if not pattern.fullmatch(each)]
    if wrong:
        message = f"no id of a {kind}: {', '.join(map(repr, wrong))}"
        return message, f"such as {example}; several with commas between"
    most = service_limits.limit_of("VpcConfig", _MEMBERS[name]).get("max")
    if most is not None and len(value) > most:
        return f"AWS allows at most {most}, got {len(value)}", f"use {most} or fewer"
    return None
