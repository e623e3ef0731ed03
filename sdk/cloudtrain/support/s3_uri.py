"""Bucket and key of an S3 URI."""

from __future__ import annotations

from typing import NamedTuple


class S3Location(NamedTuple):
    """A bucket and a key in it."""

    bucket: str
    key: str


def split_uri(uri: str) -> S3Location:
    """Return the bucket and the key of an `s3://` URI."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return S3Location(bucket, key)
