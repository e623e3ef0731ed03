"""Downloads from S3: the object or the folder that a URI names, into a folder of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.aws.retry import client_retries
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.bucket_owner import expect_owner

_ATTEMPTS = 10
_CONNECT_SECONDS = 10
_READ_SECONDS = 60


class DownloadError(Exception):
    """A download failed. The message names the URI or the key, and the reason."""


class FoundObject(NamedTuple):
    """An object, and its name relative to the URI that it was found by."""

    key: str
    name: str


def find_objects(s3: Any, uri: str) -> Iterator[FoundObject]:
    """Yield the objects that a URI names, in S3's order.

    A URI names one object when an object has exactly its key. Any other URI names a folder: the objects whose keys
    begin with its key and a slash, never those of a neighbour (`data2/x` for `s3://bucket/data`). Keys that end with a
    slash are the empty objects that consoles create for folders, and are left out.

    Raises:
        botocore.exceptions.ClientError: S3 refused.
    """
    bucket, key = split_uri(uri)
    if key and not key.endswith("/"):
        # S3 lists in the order of keys, so an object with exactly this key comes first.
        first = s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", [])
        if first and first[0]["Key"] == key:
            yield FoundObject(key, key.rpartition("/")[2])
            return
        key += "/"
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key):
        for entry in page.get("Contents", []):
            if not entry["Key"].endswith("/"):
                yield FoundObject(entry["Key"], entry["Key"].removeprefix(key))


def download(s3: Any, uri: str, folder: Path) -> int:
    """Copy what a URI names to a folder, as SageMaker's File mode does; return the number of objects.

    Args:
        s3: boto3's S3 client.
        uri: `s3://bucket/key`; `find_objects` states what it names.
        folder: Created if needed. It must not contain links.

    Raises:
        DownloadError: S3 refused, a file cannot be written, or a key does not name a file inside the folder.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = split_uri(uri).bucket
    count = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for found in find_objects(s3, uri):
            target = _path_inside(folder, found)
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, found.key, str(target))
            count += 1
    except (FileExistsError, NotADirectoryError):
        message = f"S3 has an object of the name of one of its folders, and a disk cannot hold both: {found.key!r}"
        raise DownloadError(f"{uri}: {message}; rename one of them, or name a folder without them") from None
    except (ClientError, BotoCoreError, Boto3Error, OSError) as error:
        raise DownloadError(f"{uri}: {error}") from None
    return count


def _path_inside(folder: Path, found: FoundObject) -> Path:
    """Return where an object goes.

    Raises:
        DownloadError: the name would leave the folder, or names no file.
    """
    if "\0" in found.name or not {"", ".", ".."}.isdisjoint(found.name.split("/")):
        raise DownloadError(
            f"the key {found.key!r} does not name a file inside its folder: rename the object "
            '(no part between slashes may be empty, "." or "..")'
        )
    return folder / found.name


def make_s3_client(owners: Mapping[str, str]) -> Any:
    """Return an S3 client of this environment. `owners` are the accounts that must own buckets, by bucket."""
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        retries=client_retries(_ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
    )
    client = Session().client("s3", config=config)
    expect_owner(client, owners.get)
    return client
