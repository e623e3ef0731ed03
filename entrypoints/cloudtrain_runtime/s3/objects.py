"""S3 objects: conditional writes, listings, uploads, and ranged reads with read-ahead. One type of error."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from cloudtrain_runtime.contract.aws_codes import (
    CONDITION_CONFLICT,
    CONDITION_NOT_MET,
    MISSING_OBJECT,
)
from cloudtrain_runtime.contract.bucket_owner import expect_owner, owners_from
from cloudtrain_runtime.process.environment import read_run_config
from cloudtrain_runtime.process.thread_pool import DaemonThreadPool
from cloudtrain_runtime.s3.errors import (
    S3Error,
    error_code,
    is_credentials_error,
    retry_count,
    translate_errors,
)
from cloudtrain_runtime.s3.retry import client_retries, open_session
from cloudtrain_runtime.s3.uploads import (
    Buffer,
    MultipartUpload,
    ObjectPlace,
)

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import DeleteTypeDef, ObjectIdentifierTypeDef

__all__ = ["ObjectReader", "ObjectWriter", "S3Error", "S3Objects", "s3_client"]

_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_CONNECTIONS = 32
_DELETE_BATCH = 1000
_READ_AHEAD = 4
_READ_PAUSES_SECONDS = (0.1, 0.5, 2.0, 5.0)
_CONFLICT_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
_claim = threading.local()
# By process: a lock that was held during a fork is never released in the child.
_making: dict[int, threading.Lock] = {}


class ObjectWriter(Protocol):
    """An object being uploaded."""

    def write(self, buffer: Buffer) -> None:
        """Append bytes; the buffer may be changed as soon as this returns."""


class ObjectReader(Protocol):
    """An object being read, by one thread."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes from `offset` on: `length` of them, fewer only at the object's end."""


class S3Objects:
    """Objects below an S3 prefix; keys are relative to it.

    Clients are created at first use, once per process, so that an instance survives a fork. Every method raises an
    `S3Error` when S3 rejects or fails a request after the client's retries.

    Args:
        uri: `s3://bucket` or `s3://bucket/prefix`.

    Raises:
        RuntimeError: the image lacks boto3.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._clients: dict[int, S3Client] = {}
        _require_boto3()

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless one with that key exists; return whether it was written.

        When a response was lost, the bytes decide who wrote the object: they must differ between writers.
        """
        from botocore.exceptions import ClientError

        is_retried = False
        with self._explained(f"writing {self.uri}/{key}"):
            for pause in (*_CONFLICT_PAUSES_SECONDS, None):
                try:
                    with _only_new():
                        self._client.put_object(**self._place(key), Body=data)
                except ClientError as error:
                    is_retried = is_retried or retry_count(error) > 0
                    if error_code(error) in CONDITION_NOT_MET:
                        return is_retried and self.read(key) == data
                    if error_code(error) not in CONDITION_CONFLICT or pause is None:
                        raise
                    time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  # spreads the writers
                else:
                    return True
        return False

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an existing one."""
        with self._explained(f"writing {self.uri}/{key}"):
            self._client.put_object(**self._place(key), Body=data)

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, or None if it does not exist."""
        return self._get(key, {})

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes in bytes of the objects whose keys begin with `prefix`, by key."""
        with self._explained(f"listing {self.uri}/{prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            found = [entry for page in pages for entry in page.get("Contents", [])]
        sizes = {entry["Key"].removeprefix(self._prefix): int(entry["Size"]) for entry in found}
        # The AWS console creates an empty object for a folder.
        sizes.pop("", None)
        return sizes

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""
        from botocore.exceptions import ClientError

        names: list[ObjectIdentifierTypeDef] = [{"Key": self._prefix + key} for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch: DeleteTypeDef = {"Objects": names[start : start + _DELETE_BATCH], "Quiet": True}
            with self._explained(f"deleting below {self.uri}"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=batch)
                # The first error ends the deletion.
                for failed in answer.get("Errors", []):
                    raise ClientError({"Error": failed}, f"DeleteObjects of {failed.get('Key')}")

    @contextlib.contextmanager
    def create(self, key: str) -> Iterator[ObjectWriter]:
        """Upload an object as a stream; it becomes visible, complete, when the block ends without an exception."""
        doing = f"writing {self.uri}/{key}"
        with self._explained(doing):
            upload = MultipartUpload(self._client, self._bucket, self._prefix + key)
        try:
            yield upload
            upload.complete()
        except S3Error:
            upload.abort()
            with self._explained(doing):
                raise
        except BaseException:
            upload.abort()
            raise

    @contextlib.contextmanager
    def open(self, key: str, bytes_: int) -> Iterator[ObjectReader]:
        """Read an object by ranges, whose size in bytes is known."""
        ranges = RangeReader(lambda start, end: self._range(key, start, end), bytes_)
        try:
            yield ranges
        finally:
            ranges.close()

    def _range(self, key: str, start: int, end: int) -> bytes:
        data = self._get(key, {"Range": f"bytes={start}-{end - 1}"})
        if data is None:
            raise S3Error(f"reading {self.uri}/{key}: there is no such object (any more)")
        return data

    def _get(self, key: str, options: Mapping[str, Any]) -> bytes | None:
        """Read an object or a range; retry when the connection breaks within the body, which boto3 does not do."""
        pauses = iter(_READ_PAUSES_SECONDS)
        while (body := self._body(key, options)) is not None:
            try:
                with self._explained(f"reading {self.uri}/{key}"), body:
                    return bytes(body.read())
            except S3Error:
                if (pause := next(pauses, None)) is None:
                    raise
                time.sleep(pause)
        return None

    def _body(self, key: str, options: Mapping[str, Any]) -> Any:
        """Return the body of the response, or None if the object does not exist."""
        from botocore.exceptions import ClientError

        with self._explained(f"reading {self.uri}/{key}"):
            try:
                return self._client.get_object(**self._place(key), **options)["Body"]
            except ClientError as error:
                if error_code(error) not in MISSING_OBJECT:
                    raise
                return None

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Translate clients' errors into an S3Error; after a credentials error discard the clients.

        A client reads its keys from a file or the environment only once. New clients read renewed keys.
        """
        try:
            with translate_errors(doing):
                yield
        except S3Error as error:
            if is_credentials_error(error):
                self._clients.clear()
            raise

    def _place(self, key: str) -> ObjectPlace:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @property
    def _client(self) -> S3Client:
        process = os.getpid()
        with _making.setdefault(process, threading.Lock()):
            if process not in self._clients:
                client = s3_client()
                client.meta.events.register("before-call.s3.PutObject", _add_condition)
                self._clients[process] = client
        return self._clients[process]


class RangeReader:
    """Reads an object from one thread, mostly in order. It prefetches at most `_READ_AHEAD` ranges.

    Args:
        fetch: Returns the bytes from an offset to an end.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], bytes_: int) -> None:
        self._fetch = fetch
        self._bytes = bytes_
        self._next_offset = 0
        self._ahead: dict[tuple[int, int], Future[bytes]] = {}
        self._threads = DaemonThreadPool(_READ_AHEAD, "download")

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes from `offset` on: `length` of them, fewer only at the object's end.

        Raises:
            S3Error: the range cannot be read.
        """
        end = min(offset + length, self._bytes)
        if offset >= end:
            return b""
        prefetched = self._ahead.pop((offset, end), None)
        if offset != self._next_offset:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
        elif end < self._bytes:
            prefetched = prefetched or self._threads.submit(self._fetch, offset, end)
            self._prefetch(end, length)
        self._next_offset = end
        if prefetched:
            return prefetched.result()
        return self._fetch(offset, end)

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.close()

    def _prefetch(self, offset: int, length: int) -> None:
        end = min(offset + _READ_AHEAD * length, self._bytes)
        wanted = [(start, min(start + length, self._bytes)) for start in range(offset, end, length)]
        for span in [span for span in self._ahead if span not in wanted]:
            self._ahead.pop(span).cancel()
        for span in wanted:
            if span not in self._ahead:
                self._ahead[span] = self._threads.submit(self._fetch, *span)


def s3_client() -> S3Client:
    """Return a new S3 client that retries throttling and server errors with back-off.

    Raises:
        RuntimeError: the image has no boto3.
    """
    _require_boto3()
    from botocore.config import Config

    config = Config(
        retries=client_retries(),
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        max_pool_connections=_CONNECTIONS,
        # Each body has a checksum. Over plain HTTP botocore would also compute a digest, at a sixth
        # of the speed.
        s3={"payload_signing_enabled": False},
    )
    # A new session: the default session is not safe for use by several threads.
    client = open_session().client("s3", config=config)
    expect_owner(client, bucket_owners().get)
    return client


def bucket_owners() -> dict[str, str]:
    """Return the accounts that must own buckets, from the run's configuration and the environment."""
    config = read_run_config(os.environ)
    of_run = config.bucket_owners if config is not None else {}
    return {**of_run, **owners_from(os.environ)}


def _require_boto3() -> None:
    try:
        import boto3  # noqa: F401
    except ImportError:
        raise RuntimeError(
            "this image has no boto3, which s3:// needs: add it to code.requirements"
        ) from None


@contextlib.contextmanager
def _only_new() -> Iterator[None]:
    _claim.is_new = True
    try:
        yield
    finally:
        _claim.is_new = False


def _add_condition(params: dict[str, Any], **_: Any) -> None:
    # Set as a header, because boto3 supports the parameter IfNoneMatch only from 1.35 on.
    if getattr(_claim, "is_new", False):
        params["headers"]["If-None-Match"] = "*"
