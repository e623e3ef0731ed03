"""Downloads from S3: the object or the folder that a URI names, into a folder of this machine."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.aws.credential_errors import find_credential_problem
from cloudtrain.aws.retry import client_retries
from cloudtrain.aws.s3_objects import head_object, list_objects, list_pages, transfer_manager
from cloudtrain.aws.session import NO_SHARED_FILES, make_isolated_session, make_session
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.bucket_owner import expect_owner, owners_from

if TYPE_CHECKING:
    from boto3.session import Session
    from types_boto3_s3 import S3Client

_ATTEMPTS = 10
_CONNECT_SECONDS = 10
_READ_SECONDS = 60


class DownloadError(Exception):
    """A download failed. The message names the URI or the key, and the reason."""


class FoundObject(NamedTuple):
    """An object, its name relative to the URI that it was found by, its size, and the seconds since the epoch."""

    key: str
    name: str
    bytes: int
    modified: float

    @classmethod
    def of(cls, entry: Mapping[str, Any], name: str) -> FoundObject:
        """Return the object of an entry of ListObjectsV2."""
        return cls(entry["Key"], name, int(entry["Size"]), entry["LastModified"].timestamp())


def find_objects(s3: S3Client, uri: str) -> Iterator[FoundObject]:
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
        first = next(list_pages(s3, uri, MaxKeys=1)).get("Contents", [])
        if first and first[0]["Key"] == key:
            yield FoundObject.of(first[0], key.rpartition("/")[2])
            return
        key += "/"
    for entry in list_objects(s3, f"s3://{bucket}/{key}"):
        yield FoundObject.of(entry, entry["Key"].removeprefix(key))


def download(s3: S3Client, uri: str, folder: Path) -> int:
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
        raise DownloadError(
            f"{uri}: {message}; rename one of them, or name a folder without them"
        ) from None
    except (ClientError, BotoCoreError, Boto3Error, OSError) as error:
        if problem := find_credential_problem(error):
            raise DownloadError(f"{uri}: {problem.message}: {problem.hint}") from None
        raise DownloadError(f"{uri}: {error}") from None
    return count


def names_file(name: str) -> bool:
    """Return whether a name from outside, with `/` between its parts, names a file inside any folder."""
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def fetch_objects(
    s3: S3Client, wanted: Iterable[tuple[str, str, Path]], on_bytes: Callable[[int], object]
) -> Iterator[None]:
    """Download objects in parallel, each given by bucket, key and target; yield after each one, in their order.

    Args:
        s3: boto3's S3 client.
        wanted: The objects. A target's folder exists.
        on_bytes: Called by several threads with numbers of bytes; negative before a part is fetched again.

    Raises:
        boto3.exceptions.Boto3Error, botocore.exceptions.ClientError: S3 refused; the others are cancelled.
    """
    from boto3.s3.transfer import ProgressCallbackInvoker

    counter = [ProgressCallbackInvoker(on_bytes)]
    with transfer_manager(s3) as manager:
        waiting = [
            manager.download(bucket, key, str(path), subscribers=counter)
            for bucket, key, path in wanted
        ]
        for each in waiting:
            each.result()
            yield


def stored_digest(s3: S3Client, uri: str) -> tuple[str, str] | None:
    """Return the algorithm and hexadecimal digest that S3 has stored for all bytes of an object, or None.

    The ETag is the MD5 of an object that was uploaded in one part and is not encrypted with a key of KMS or the user.

    Raises:
        botocore.exceptions.ClientError: S3 refused.
    """
    head = head_object(s3, uri)
    for algorithm in ("sha256", "crc32"):
        value = head.get(f"Checksum{algorithm.upper()}", "-")
        if "-" not in value and head.get("ChecksumType") != "COMPOSITE":
            return algorithm, base64.b64decode(value).hex()
    tag = str(head.get("ETag", "")).strip('"')
    is_plain = (
        head.get("ServerSideEncryption", "AES256") == "AES256"
        and "SSECustomerAlgorithm" not in head
    )
    if not is_plain or not re.fullmatch("[0-9a-f]{32}", tag):
        return None
    return "md5", tag


def _path_inside(folder: Path, found: FoundObject) -> Path:
    """Return where an object goes.

    Raises:
        DownloadError: the name would leave the folder, or names no file.
    """
    if not names_file(found.name):
        raise DownloadError(
            f"the key {found.key!r} does not name a file inside its folder: rename the object "
            '(no part between slashes may be empty, "." or "..")'
        )
    return folder / found.name


def make_s3_client(
    owners: Mapping[str, str], session: Session | None = None, endpoint_url: str | None = None
) -> S3Client:
    """Return an S3 client of a session, by default one of this environment.

    Args:
        owners: The accounts that must own buckets, by bucket.
        session: A boto3 session.
        endpoint_url: Address of the service; by default that of the environment.
    """
    from botocore.config import Config

    config = Config(
        retries=client_retries(_ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
    )
    client = (session or make_session()).client("s3", config=config, endpoint_url=endpoint_url)
    expect_owner(client, owners.get)
    return client


def make_s3_client_of(environ: Mapping[str, str]) -> S3Client:
    """Return an S3 client of another environment than this process's, such as that of a sandbox.

    Args:
        environ: Environment variables with region, endpoint, credentials and owners of buckets. What it lacks comes
            from this process's environment and files, unless it excludes AWS's files, as that of a sandbox does.
    """
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint and NO_SHARED_FILES.items() <= environ.items():
        isolated = make_isolated_session(
            endpoint,
            environ["AWS_ACCESS_KEY_ID"],
            environ["AWS_SECRET_ACCESS_KEY"],
            environ["AWS_DEFAULT_REGION"],
        )
        return make_s3_client(owners_from(environ), isolated)
    session = make_session(
        aws_access_key_id=environ.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=environ.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=environ.get("AWS_SESSION_TOKEN"),
        region_name=environ.get("AWS_DEFAULT_REGION"),
    )
    return make_s3_client(owners_from(environ), session, endpoint)
