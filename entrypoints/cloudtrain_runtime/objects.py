"""Objects in S3: conditional writes, listings, streaming uploads and ranged reads, with one kind of error."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

_DELETE_BATCH = 1000


class ObjectsError(OSError):
    """What S3 refuses or cannot do; the message says what to do about it."""


class Writer(Protocol):
    """An object being uploaded."""

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        """Append bytes; the buffer may be changed as soon as this returns."""
        ...


class Source(Protocol):
    """An object being read."""

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return the bytes from `offset` on: `length` of them, fewer only at the object's end."""
        ...


class Objects:
    """Objects below an S3 prefix; keys are relative to it.

    Args:
        uri: `s3://bucket` or `s3://bucket/prefix`.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = s3_client()

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one of that name; return whether it was written."""
        from botocore.exceptions import ClientError

        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] != "PreconditionFailed":
                raise ObjectsError(str(error)) from error
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, or None when there is no such object."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
        except self._client.exceptions.NoSuchKey:
            return None
        return bytes(answer["Body"].read())

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes in bytes of the objects whose keys begin with `prefix`."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        return {
            entry["Key"].removeprefix(self._prefix): entry["Size"]
            for page in pages
            for entry in page.get("Contents", [])
        }

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        names = [{"Key": self._prefix + key} for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})

    @contextlib.contextmanager
    def _create(self, key: str) -> Iterator[Writer]:
        buffer = io.BytesIO()
        yield buffer  # type: ignore[misc]
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=buffer.getvalue())

    def create(self, key: str) -> AbstractContextManager[Writer]:
        """Upload an object as a stream; after an exception in the block there is none."""
        return self._create(key)

    @contextlib.contextmanager
    def _open(self, key: str, bytes_: int) -> Iterator[Source]:
        del bytes_
        yield _Whole(self.read(key) or b"")

    def open(self, key: str, bytes_: int) -> AbstractContextManager[Source]:
        """Read an object of a known size by ranges."""
        return self._open(key, bytes_)


class _Whole:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_at(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def s3_client() -> Any:
    """Return an S3 client that retries throttling and server errors with back-off.

    Raises:
        RuntimeError: the image has no boto3.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise RuntimeError("this image has no boto3, which s3:// needs: add it to code.requirements") from None
    return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 10}))
