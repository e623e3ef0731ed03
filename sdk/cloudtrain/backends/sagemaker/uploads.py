"""Uploads of code, data and configuration to S3. An object becomes visible only when it is complete.

An interrupted PutObject or multipart upload leaves no object under its key (Amazon S3 User Guide, "Uploading and
copying objects using multipart upload", 2026-11). A failed or interrupted upload is aborted, so that no parts remain;
only a killed client leaves some.

An existing object is kept only if its SHA-256 in S3 is that of the file: a job that may write to the bucket may have put
another one there. The SHA-256 of an object in parts is the digest of the parts' digests (Amazon S3 User Guide, "Checking
object integrity", 2026-11).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.errors import SuppressCodes
from cloudtrain.aws.s3_objects import age_seconds, head_object, list_objects, transfer_manager
from cloudtrain.bundle import ProgressCallback, printable_name
from cloudtrain.errors import UserError
from cloudtrain.support.data_files import data_files
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.aws_codes import DENIED, MISSING_OBJECT, code_of

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

PART_BYTES = 8 * 2**20
"""Size of a part. Larger files are uploaded in parts."""
MAX_CONCURRENCY = 10
"""Number of parallel requests, the size of botocore's connection pool (max_pool_connections)."""

_MAX_ARCHIVE_AGE = timedelta(days=30)
"""Older archives are uploaded again, so that a lifecycle rule for old code does not delete one that a job needs."""


@dataclass(frozen=True)
class _FileUpload:
    """A file and the object to create."""

    path: Path
    bucket: str
    key: str
    size: int


@dataclass(frozen=True)
class _ExistingObject:
    """An existing object. `checksum` is empty if it has no SHA-256, or if S3 does not reveal whether it exists."""

    checksum: str
    is_old: bool


class Uploads:
    """The uploads of one submit: collected first, so that their size is known, then sent in parallel."""

    def __init__(self, client: S3Client) -> None:
        self._client = client
        self._items: list[_FileUpload] = []

    def add_archive(self, path: Path, uri: str) -> None:
        """Add a file whose name contains the digest of its content, unless the object exists.

        An object with another content is replaced. An old object is replaced, too, because a lifecycle rule may
        delete it soon; its age counts from its last upload.

        Raises:
            botocore.exceptions.ClientError: S3 refused.
        """
        item = _FileUpload(path, *split_uri(uri), _size(path))
        found = self._find(uri)
        if found is None or found.is_old or found.checksum != _checksum(path):
            self._items.append(item)

    def renew_archive(self, uri: str, folder: Path) -> None:
        """Upload the archive of an earlier run again, through a folder, if it is old (see `add_archive`).

        Raises:
            UserError: the archive does not exist any more.
            botocore.exceptions.ClientError: S3 refused.
        """
        found = self._find(uri)
        if found is None:
            raise UserError(
                f"the code of the earlier run was deleted from {uri}, perhaps by a lifecycle rule",
                "submit the job again and resume: cloudtrain submit JOB --set checkpoint.resume=RUN",
            )
        if found.is_old:
            bucket, key = split_uri(uri)
            path = folder / Path(key).name
            self._client.download_file(bucket, key, str(path))
            self._items.append(_FileUpload(path, bucket, key, _size(path)))

    def add_folder(self, path: Path, uri: str) -> None:
        """Add the files of a folder, or one file, except those that exist in S3 with the same content.

        Raises:
            UserError: there is no file, or a file cannot be read, or its name cannot be a key.
            botocore.exceptions.ClientError: S3 refused.
        """
        uri = f"{uri.rstrip('/')}/"
        bucket, prefix = split_uri(uri)
        items = [
            _FileUpload(file, bucket, f"{prefix}{name}", _size(file)) for file, name in _files(path)
        ]
        if not items:
            raise UserError(
                f"{path} contains no file to upload", "name a folder that contains the data"
            )
        existing = self._sizes_below(uri)
        same_size = [item for item in items if existing.get(item.key) == item.size]
        with ThreadPoolExecutor(MAX_CONCURRENCY) as pool:
            kept = set(itertools.compress(same_size, pool.map(self._is_there, same_size)))
        self._items += [item for item in items if item not in kept]

    def send(self, progress: ProgressCallback | None = None) -> None:
        """Upload the added files and wait for all of them.

        Args:
            progress: Callback `(bytes_done, bytes_total)`.

        Raises:
            UserError: a file cannot be read.
            botocore.exceptions.ClientError: S3 refused a file; the remaining ones are not uploaded.
        """
        items = self._items
        self._items = []
        total = sum(item.size for item in items)
        self._transfer(
            [(str(item.path), item.bucket, item.key) for item in items],
            _make_byte_counter(progress, total),
        )

    def put_texts(self, texts: Mapping[str, str]) -> None:
        """Upload texts, by URI.

        Raises:
            botocore.exceptions.ClientError: S3 refused.
        """
        self._transfer(
            [(BytesIO(text.encode()), *split_uri(uri)) for uri, text in texts.items()], None
        )

    def _transfer(
        self, sources: Iterable[tuple[Any, str, str]], on_bytes: Callable[[int], None] | None
    ) -> None:
        from boto3.s3.transfer import ProgressCallbackInvoker

        subscribers = [] if on_bytes is None else [ProgressCallbackInvoker(on_bytes)]
        # On an exception, KeyboardInterrupt included, the manager cancels and aborts the running uploads.
        with (
            _user_errors(),
            transfer_manager(
                self._client,
                multipart_threshold=PART_BYTES,
                multipart_chunksize=PART_BYTES,
                max_concurrency=MAX_CONCURRENCY,
            ) as manager,
        ):
            waiting = [
                manager.upload(
                    source, bucket, key, {"ChecksumAlgorithm": "SHA256"}, subscribers=subscribers
                )
                for source, bucket, key in sources
            ]
            for each in waiting:
                each.result()

    def _is_there(self, item: _FileUpload) -> bool:
        """Return whether an object with the content of the file exists."""
        found = self._find(f"s3://{item.bucket}/{item.key}")
        return found is not None and found.checksum == _checksum(item.path)

    def _find(self, uri: str) -> _ExistingObject | None:
        """Return an existing object, or None."""
        from botocore.exceptions import ClientError

        try:
            head = head_object(self._client, uri)
        except ClientError as error:
            if code_of(error) in DENIED:
                # S3 answers so for a missing object, too, without permission to list the bucket.
                return _ExistingObject(checksum="", is_old=False)
            if code_of(error) in MISSING_OBJECT:
                return None
            raise
        is_old = age_seconds(head) > _MAX_ARCHIVE_AGE.total_seconds()
        # The checksum of an object in parts ends with their number: "...=-3".
        checksum = str(head.get("ChecksumSHA256", "")).partition("-")[0]
        return _ExistingObject(checksum, is_old)

    def _sizes_below(self, uri: str) -> dict[str, int]:
        """Return sizes by key; empty without permission to list."""
        with SuppressCodes(DENIED):
            return {entry["Key"]: int(entry["Size"]) for entry in list_objects(self._client, uri)}
        return {}


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield files, each with its path relative to the folder."""

    def fail(error: OSError) -> None:
        raise error

    with _user_errors():
        for file, name in data_files(path, on_error=fail):
            try:
                name.encode()
            except UnicodeEncodeError:
                message = f"the name of {printable_name(name)} is not UTF-8, as S3 requires"
                raise UserError(message, "rename the file") from None
            yield file, name


def _size(path: Path) -> int:
    with _user_errors():
        return path.stat().st_size


def _checksum(path: Path) -> str:
    """Return the SHA-256 that S3 has for a file after its upload, in base64."""
    with _user_errors(), path.open("rb") as file:
        content = file.read(PART_BYTES)
        digest = hashlib.sha256(content)
        if len(content) == PART_BYTES:
            digest = hashlib.sha256(digest.digest())
            while part := file.read(PART_BYTES):
                digest.update(hashlib.sha256(part).digest())
    return base64.b64encode(digest.digest()).decode()


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turn errors of local files into user errors. Errors of S3 are no OSError."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}", "make it readable, or move it"
        ) from None


def _make_byte_counter(
    progress: ProgressCallback | None, total: int
) -> Callable[[int], None] | None:
    """Return a thread-safe callback for uploaded bytes. The count is negative before a part is sent again."""
    if progress is None:
        return None
    done = 0
    lock = threading.Lock()

    def count(step: int) -> None:
        nonlocal done
        with lock:
            done += step
            progress(done, total)

    return count
