"""S3 URIs: taken apart."""

from __future__ import annotations

from typing import NamedTuple


class S3Location(NamedTuple):
    """An `s3://` uri's parts."""

    bucket: str
    key: str


def split_uri(uri: str) -> S3Location:
    """Return the parts of an `s3://` uri."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return S3Location(bucket, key)
