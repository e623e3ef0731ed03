"""Buckets, objects and multipart uploads of the S3 test server."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

_PIECE_BYTES = 1 << 20


class RequestError(Exception):
    """An error response: status, code and message."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


@dataclass
class StoredObject:
    """One object, in memory (`pieces`) or in a file (`path`)."""

    etag: str
    modified: float
    pieces: list[bytearray]
    path: Path | None = None

    @property
    def bytes_(self) -> int:
        """Size in bytes."""
        return self.path.stat().st_size if self.path else sum(len(piece) for piece in self.pieces)

    def read_range(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` up to `end`, in pieces."""
        if self.path:
            with self.path.open("rb") as file:
                file.seek(start)
                while start < end and (data := file.read(min(_PIECE_BYTES, end - start))):
                    start += len(data)
                    yield memoryview(data)
            return
        position = 0
        for piece in self.pieces:
            first, last = max(start - position, 0), min(end - position, len(piece))
            if first < last:
                yield memoryview(piece)[first:last]
            position += len(piece)


@dataclass
class Upload:
    """A multipart upload: its parts by number, each with ETag and content."""

    bucket: str
    key: str
    parts: dict[int, tuple[str, bytearray]]


class Storage:
    """Buckets, objects and uploads.

    Args:
        folder: Folder of the objects, which a restarted server reads again. In memory without one.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self.uploads: dict[str, Upload] = {}
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            for bucket in (path for path in folder.iterdir() if path.is_dir()):
                self.buckets[bucket.name] = {
                    unquote(path.name): StoredObject(new_etag(), path.stat().st_mtime, [], path)
                    for path in bucket.iterdir()
                    if not path.name.startswith(".")
                }

    def create_bucket(self, bucket: str) -> None:
        """Create a bucket unless it exists."""
        with self.lock:
            self.buckets.setdefault(bucket, {})
        if self.folder:
            (self.folder / bucket).mkdir(exist_ok=True)

    def reset(self, bucket: str) -> None:
        """Delete all objects and uploads, and create one bucket."""
        for name, objects in list(self.buckets.items()):
            for key in list(objects):
                self.delete(name, key)
        self.uploads.clear()
        self.create_bucket(bucket)

    def bucket(self, name: str) -> dict[str, StoredObject]:
        """Return the objects of a bucket by key.

        Raises:
            RequestError: There is no such bucket.
        """
        if name not in self.buckets:
            raise RequestError(404, "NoSuchBucket", "The specified bucket does not exist")
        return self.buckets[name]

    def get(self, bucket: str, key: str) -> StoredObject:
        """Return an object.

        Raises:
            RequestError: There is no such bucket or key.
        """
        found = self.bucket(bucket).get(key)
        if found is None:
            raise RequestError(404, "NoSuchKey", "The specified key does not exist.")
        return found

    def put(
        self,
        bucket: str,
        key: str,
        pieces: list[bytearray],
        none_match: str | None,
        match: str | None,
    ) -> str:
        """Store an object and return its ETag.

        Args:
            bucket: Name of the bucket.
            key: Key of the object.
            pieces: Content.
            none_match: Value of the If-None-Match header.
            match: Value of the If-Match header.

        Raises:
            RequestError: A condition is not met.
        """
        made = StoredObject(new_etag(), time.time(), pieces)
        if self.folder:
            made.path = self.folder / bucket / quote(key, safe="")
            draft = made.path.with_name(f".{uuid.uuid4().hex}")
            with draft.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            made.pieces = []
        with self.lock:
            objects = self.bucket(bucket)
            existing = objects.get(key)
            if match is not None and existing is None:
                raise RequestError(404, "NoSuchKey")
            if (none_match == "*" and existing) or (
                match is not None and existing and existing.etag != match
            ):
                raise RequestError(
                    412, "PreconditionFailed", "At least one of the pre-conditions did not hold"
                )
            if made.path:
                draft.rename(made.path)
            objects[key] = made
        return made.etag

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object if it exists."""
        with self.lock:
            deleted = self.bucket(bucket).pop(key, None)
            if deleted and deleted.path:
                deleted.path.unlink()

    def upload(self, upload_id: str) -> Upload:
        """Return a multipart upload.

        Raises:
            RequestError: There is no such upload.
        """
        found = self.uploads.get(upload_id)
        if found is None:
            raise RequestError(404, "NoSuchUpload", "The specified upload does not exist.")
        return found


def new_etag() -> str:
    """Return a random ETag, in quotes as in a header."""
    return f'"{uuid.uuid4().hex}"'
