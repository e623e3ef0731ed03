"""Objects in S3 by URI: list, read, and write, also under a condition. They take boto3's S3 client.

Each function raises botocore's exceptions, which `aws_errors` translates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.clock import aws_time
from cloudtrain.aws.errors import SuppressCodes
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.aws_codes import (
    CONDITION_CONFLICT,
    CONDITION_NOT_MET,
    DENIED,
    MISSING_OBJECT,
    Codes,
)
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from s3transfer.manager import TransferManager
    from types_boto3_s3 import S3Client

HIDDEN_OBJECT: Codes = MISSING_OBJECT | DENIED
"""S3's responses for a missing object. Without the permission to list the bucket, it is a denial."""

_REFUSED_WRITE = CONDITION_NOT_MET | CONDITION_CONFLICT | MISSING_OBJECT
"""S3 answers `If-Match` with the last ones if the object has been deleted in the meantime."""


@dataclass(frozen=True)
class ReadObject:
    """An object that was read.

    Attributes:
        body: Its bytes.
        etag: Its ETag.
        age_seconds: Time since it was written.
        metadata: The metadata that its writer gave.
    """

    body: bytes
    etag: str
    age_seconds: float
    metadata: Mapping[str, str]


def list_pages(s3: S3Client, uri: str, **options: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of ListObjectsV2 with the keys that begin with a URI's key, as SageMaker's S3Prefix does.

    `options` are other parameters of the operation. There is one page at least.
    """
    bucket, key = split_uri(uri)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key, **options)
    yield from pages


def entries_of(page: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the objects of a page, without the empty ones whose keys end with a slash: consoles' folders."""
    return [entry for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")]


def list_objects(s3: S3Client, uri: str) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of ListObjectsV2 whose keys begin with a URI's key, without those of folders."""
    for page in list_pages(s3, uri):
        yield from entries_of(page)


def list_folders(s3: S3Client, uri: str) -> list[str]:
    """Return the names of the folders directly below a URI that ends with a slash."""
    pages = list_pages(s3, uri, Delimiter="/")
    prefixes = [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", ())]
    return [prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes]


def get_object(s3: S3Client, uri: str) -> ReadObject:
    """Read an object."""
    bucket, key = split_uri(uri)
    answer = s3.get_object(Bucket=bucket, Key=key)
    return ReadObject(
        body=bytes(answer["Body"].read()),
        etag=str(answer["ETag"]),
        age_seconds=age_seconds(answer),
        metadata=answer.get("Metadata", {}),
    )


def find_object(s3: S3Client, uri: str, missing: Codes = MISSING_OBJECT) -> ReadObject | None:
    """Read an object; return None if S3 answers that it is missing.

    Args:
        s3: boto3's S3 client.
        uri: The object.
        missing: Error codes of a missing object; `HIDDEN_OBJECT` if the credentials need not be allowed to list.
    """
    with SuppressCodes(missing):
        return get_object(s3, uri)
    return None


def find_json(s3: S3Client, uri: str, missing: Codes = MISSING_OBJECT) -> dict[str, Any] | None:
    """Read a JSON object as `find_object` does; return an empty one for any other content."""
    found = find_object(s3, uri, missing)
    if found is None:
        return None
    try:
        content = load_json(found.body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def head_object(s3: S3Client, uri: str) -> Mapping[str, Any]:
    """Return S3's description of an object, with its checksums."""
    bucket, key = split_uri(uri)
    return s3.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")


def put_object(s3: S3Client, uri: str, body: bytes, **options: Any) -> str:
    """Write an object and return its ETag. `options` are other parameters of PutObject."""
    bucket, key = split_uri(uri)
    return s3.put_object(Bucket=bucket, Key=key, Body=body, **options)["ETag"]


def put_if(s3: S3Client, uri: str, body: bytes, *, etag: str | None, **options: Any) -> str | None:
    """Write an object in place of the version with this ETag, or where there is none (None).

    A write whose response was lost is sent again, and then S3 refuses it because of the first one. `options` are other
    parameters of PutObject.

    Returns:
        The new ETag, or None if S3 refuses because the object is another one.
    """
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    with SuppressCodes(_REFUSED_WRITE):
        return put_object(s3, uri, body, **condition, **options)
    return None


def transfer_manager(s3: S3Client, **options: Any) -> TransferManager:
    """Return a manager of parallel transfers, which cancels them on an exception. `options`: of `TransferConfig`."""
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    # The CRT client behaves differently on interrupts.
    config = TransferConfig(preferred_transfer_client="classic", **options)
    return create_transfer_manager(s3, config)


def age_seconds(answer: Mapping[str, Any]) -> float:
    """Return the time since an object was written. Both times come from S3: this machine's clock may be wrong."""
    now = aws_time(answer)
    written: float = answer["LastModified"].timestamp()
    return max(0.0, (time.time() if now is None else now) - written)
