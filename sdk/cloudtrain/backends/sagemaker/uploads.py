"""What must lie in S3 before a job starts. Every object is there as a whole, or not at all.

S3 shows an object when its last byte has come: a PutObject that breaks off, and a multipart upload that is not
completed, leave nothing under their key (Amazon S3 User Guide, "Uploading and copying objects using multipart upload",
2026-11). An upload that fails or is interrupted is aborted, so that no parts stay behind; only a client that is killed
leaves some.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from cloudtrain.bundle import ProgressCallback, printable_name
from cloudtrain.errors import UserError
from cloudtrain.support.data_files import data_files
from cloudtrain.support.s3_uri import split_uri

PART_BYTES = 8 * 2**20
"""Size of a part, and from which size on a file is sent in parts."""
MAX_CONCURRENCY = 10
"""Requests at once; botocore keeps as many connections (max_pool_connections)."""

_MAX_ARCHIVE_AGE_DAYS = 30
"""Age from which on an archive is sent again, so that a lifecycle rule for old code takes none that a job needs."""

_NOT_FOUND = ("404", "NoSuchKey", "NotFound")
_ACCESS_DENIED = ("403", "AccessDenied")
"""S3's answer about an object that is not there to who may not list the bucket (API reference of HeadObject)."""


@dataclass(frozen=True)
class UploadResult:
    """What an upload did.

    Attributes:
        files: Files that were sent.
        bytes: Their size.
        kept: Files that lay there already.
    """

    files: int
    bytes: int
    kept: int


@dataclass(frozen=True)
class _FileUpload:
    """One file, and the object that it becomes."""

    path: Path
    bucket: str
    key: str
    size: int


@dataclass(frozen=True)
class _ExistingObject:
    """An object that is there, or of which S3 does not tell: then without a size."""

    size: int | None
    is_old: bool


class Uploads:
    """The uploads of one submit: collected first, so that all bytes are known, then sent several at once.

    Args:
        client: boto3's S3 client.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._items: list[_FileUpload] = []
        self._kept = 0

    def add_archive(self, path: Path, uri: str) -> None:
        """Add a file whose name holds the digest of its content, unless it lies there.

        Equal digests mean equal archives, so an object of another size was not completed by us: it is replaced. So is
        one that a lifecycle rule may soon take: its age counts from the last time that it was sent.

        Raises:
            botocore.exceptions.ClientError: S3 refused.
        """
        item = _FileUpload(path, *split_uri(uri), _size(path))
        found = self._look(item.bucket, item.key)
        if found is not None and found.size == item.size and not found.is_old:
            self._kept += 1
        else:
            self._items.append(item)

    def renew_archive(self, uri: str, folder: Path) -> None:
        """Add what an earlier run has sent, where it is old: see `add_archive`.

        Args:
            uri: Of the archive.
            folder: Holds it until it is sent; it need not be on this machine.

        Raises:
            UserError: it is gone.
            botocore.exceptions.ClientError: S3 refused.
        """
        bucket, key = split_uri(uri)
        found = self._look(bucket, key)
        if found is None:
            raise UserError(
                f"the code of the earlier run is gone from {uri}, perhaps by a rule that lets old code expire",
                "submit the job anew, and let it go on: cloudtrain submit JOB --set checkpoint.resume=RUN",
            )
        if not found.is_old:
            self._kept += 1
            return
        path = folder / Path(key).name
        self._client.download_file(bucket, key, str(path))
        self._items.append(_FileUpload(path, bucket, key, _size(path)))

    def add_folder(self, path: Path, uri: str) -> None:
        """Add every file of a folder, or one file, but for those that lie there with the size that they have here.

        Only for a place of the run's own: elsewhere an object of equal size could be another.

        Raises:
            UserError: there is no file, or one cannot be read or named in S3.
            botocore.exceptions.ClientError: S3 refused.
        """
        bucket, prefix = split_uri(f"{uri.rstrip('/')}/")
        items = [_FileUpload(file, bucket, f"{prefix}{name}", _size(file)) for file, name in _files(path)]
        if not items:
            raise UserError(f"{path} holds no file to upload", "name a folder that holds the data")
        there = self._sizes_below(bucket, prefix)
        missing = [item for item in items if there.get(item.key) != item.size]
        self._kept += len(items) - len(missing)
        self._items += missing

    def send(self, progress: ProgressCallback | None = None) -> UploadResult:
        """Send what was added; return when all of it is in place.

        Args:
            progress: Told how many bytes have been sent, and how many there are.

        Raises:
            UserError: a file cannot be read.
            botocore.exceptions.ClientError: S3 refused one; what was not sent yet is not sent.
        """
        items, self._items = self._items, []
        total = sum(item.size for item in items)
        self._transfer([(str(item.path), item.bucket, item.key) for item in items], _counted(progress, total))
        return UploadResult(len(items), total, self._kept)

    def put_texts(self, texts: Mapping[str, str]) -> None:
        """Put texts in place, by uri.

        Raises:
            botocore.exceptions.ClientError: S3 refused.
        """
        self._transfer([(BytesIO(text.encode()), *split_uri(uri)) for uri, text in texts.items()], None)

    def _transfer(self, sources: Iterable[tuple[Any, str, str]], told: Callable[[int], None] | None) -> None:
        from boto3.s3.transfer import ProgressCallbackInvoker, TransferConfig, create_transfer_manager

        config = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=MAX_CONCURRENCY,
            preferred_transfer_client="classic",  # the other one, if installed, ends otherwise when it is interrupted
        )
        subscribers = [] if told is None else [ProgressCallbackInvoker(told)]
        # When its block is left by an exception, Ctrl-C among them, the manager cancels and aborts what has begun.
        with _unreadable_told(), create_transfer_manager(self._client, config) as manager:
            waiting = [manager.upload(source, bucket, key, subscribers=subscribers) for source, bucket, key in sources]
            for each in waiting:
                each.result()

    def _look(self, bucket: str, key: str) -> _ExistingObject | None:
        """Return what lies there, or None."""
        from botocore.exceptions import ClientError

        try:
            answer = self._client.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] in _ACCESS_DENIED:
                return _ExistingObject(size=None, is_old=False)
            if error.response["Error"]["Code"] not in _NOT_FOUND:
                raise
            return None
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])  # both times are S3's own
        is_old = now - answer["LastModified"] > timedelta(days=_MAX_ARCHIVE_AGE_DAYS)
        return _ExistingObject(int(answer["ContentLength"]), is_old)

    def _sizes_below(self, bucket: str, prefix: str) -> dict[str, int]:
        """Return sizes by key; nothing where the caller may not list."""
        from botocore.exceptions import ClientError

        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        try:
            return {entry["Key"]: int(entry["Size"]) for page in pages for entry in page.get("Contents", ())}
        except ClientError as error:
            if error.response["Error"]["Code"] not in _ACCESS_DENIED:
                raise
            return {}


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield files, each with its path below the folder."""
    with _unreadable_told():
        for file, name in data_files(path, on_error=_fail):
            yield file, _key(name)


def _fail(error: OSError) -> None:
    """Do not pass over a folder that cannot be read."""
    raise error


def _key(name: str) -> str:
    """Return a name that S3 can hold.

    Raises:
        UserError: it is no text.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{printable_name(name)} has a name that is no UTF-8, which S3 cannot hold", "rename it"
        ) from None
    return name


def _size(path: Path) -> int:
    with _unreadable_told():
        return path.stat().st_size


@contextlib.contextmanager
def _unreadable_told() -> Iterator[None]:
    """Tell of a file on this machine that cannot be read; what S3 says is no OSError."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename} cannot be read: {error.strerror}", "make it readable, or move it") from None


def _counted(progress: ProgressCallback | None, total: int) -> Callable[[int], None] | None:
    """Return what is told the bytes of each step, by many threads; a part that is sent again takes its bytes back."""
    if progress is None:
        return None
    done, lock = 0, threading.Lock()

    def count(step: int) -> None:
        nonlocal done
        with lock:
            done += step
            progress(done, total)

    return count
