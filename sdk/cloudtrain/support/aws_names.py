"""Forms of AWS's names: ARNs, S3 buckets and images in ECR."""

from __future__ import annotations

from typing import NamedTuple

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

BUCKET_PATTERN = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
BUCKET = lazy_pattern(BUCKET_PATTERN)
ROLE_ARN = lazy_pattern(
    r"arn:(aws[a-z-]*):iam::([0-9]{12}):role/((?:[\x21-\x7e]{1,511}/)?)([A-Za-z0-9_+=,.@-]{1,64})"
)
"""Groups: partition, account, path and name."""


class Arn(NamedTuple):
    """The parts of an ARN, `arn:partition:service:region:account:resource`. Some are empty for some services."""

    partition: str
    service: str
    region: str
    account: str
    resource: str


def parse_arn(text: str) -> Arn | None:
    """Return the parts of an ARN; None when a text is no ARN."""
    first, *parts = text.split(":", 5)
    if first != "arn" or len(parts) != len(Arn._fields):
        return None
    return Arn(*parts)


def arn_pattern(service: str, resource: str) -> str:
    """Return a pattern of the ARNs of a service's resources, which match the pattern `resource`."""
    return rf"arn:aws[a-z-]*:{service}:[a-z0-9-]*:[0-9]{{12}}:{resource}"


PUBLIC_REGISTRY = "public.ecr.aws/"
"""Beginning of the URI of an image in Amazon's public registry."""
_IMAGE = lazy_pattern(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)"
    r"\.(?:amazonaws\.(?:com(?:\.cn)?|eu)|(?:c2s\.ic|sc2s\.sgov|csp\.hci\.ic)\.gov|cloud\.adc-e\.uk)/"
    r"(?P<repository>[a-z0-9._/-]+?)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


class ImageUri(NamedTuple):
    """The parts of an image's URI in ECR; `tag` and `digest` may be missing."""

    account: str
    region: str
    repository: str
    tag: str | None
    digest: str | None


def parse_image(uri: str) -> ImageUri | None:
    """Return the parts of an image's URI, or None if it is not in ECR."""
    match = _IMAGE.fullmatch(uri)
    if match is None:
        return None
    return ImageUri(**match.groupdict())
