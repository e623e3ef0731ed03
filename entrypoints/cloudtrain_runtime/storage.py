"""Folders of checkpoints, on a file system or in S3, in which each one appears in one step.

Run as a program (`python -m cloudtrain_runtime.storage SOURCE FOLDER`) it copies an S3 prefix to a folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from cloudtrain_runtime.contract.manifest import step_of

WRITER_FILE = "writer.json"
_PARTIAL = ".writing-"
_DAMAGED = ".damaged-"


class Source(Protocol):
    """A file that can be read anywhere."""

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset` on, fewer at the end of the file."""
        ...


class Storage(Protocol):
    """A folder whose subfolders are written whole.

    Ranks write their files into a workspace, hand them in with `add`, and one rank makes them visible with `publish`.
    Until then a reader sees nothing of them.
    """

    uri: str

    def workspace(self, name: str, token: str) -> Path:
        """Return the local folder that this rank writes the files of `name` to. `token` is the same on all ranks."""
        ...

    def add(self, workspace: Path, name: str) -> None:
        """Make this rank's files durable."""
        ...

    def publish(self, workspace: Path, name: str, marker: str, text: str) -> None:
        """Write the marker file, the last one; with it the folder exists."""
        ...

    def names(self) -> list[str]:
        """Return the names of all folders that may have been published."""
        ...

    def read_text(self, name: str, file: str) -> str | None:
        """Return a file's text, or None when there is no such file."""
        ...

    def sizes(self, name: str) -> dict[str, int]:
        """Return the files of a folder and their sizes in bytes."""
        ...

    def fetch(self, name: str) -> Path:
        """Return a local folder with the files. Call `release` when done."""
        ...

    def release(self, folder: Path) -> None:
        """Give back what `fetch` returned."""
        ...

    def set_aside(self, name: str, marker: str) -> None:
        """Make a damaged folder invisible, so that its name can be used again. Nothing happens without one."""
        ...

    def delete(self, name: str, marker: str) -> None:
        """Delete a folder, its marker first."""
        ...

    def folders(self) -> dict[str, dict[str, int]]:
        """Return the folders of checkpoints, finished or not, with the sizes of their files in bytes."""
        ...

    def read(self, folder: str, file: str) -> bytes | None:
        """Return a small file, or None when there is no such file."""
        ...

    def open(self, folder: str, file: str, bytes_: int) -> contextlib.AbstractContextManager[Source]:
        """Open a file of that size to read it in pieces."""
        ...


def open_storage(uri: str) -> Storage:
    """Return the storage at a `file:///`, `s3://` uri or a plain path."""
    if uri.startswith("s3://"):
        return S3Storage(uri)
    return FolderStorage(path_of(uri))


def step_of_folder(folder: str) -> int | None:
    """Return the step of a checkpoint's folder, also of one that is still written, or None for another name."""
    return step_of(folder.removeprefix(_PARTIAL))


def path_of(uri: str) -> Path:
    """Return the path of a `file:///` uri or a plain path."""
    return Path(unquote(urlsplit(uri).path)) if uri.startswith("file://") else Path(uri)


class FolderStorage:
    """Checkpoints below a folder that all ranks share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.absolute().as_uri()

    def workspace(self, name: str, token: str) -> Path:
        path = self.root / f"{_PARTIAL}{name}-{token}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, workspace: Path, name: str) -> None:
        del workspace, name  # written in place; DCP and the marker sync their files

    def publish(self, workspace: Path, name: str, marker: str, text: str) -> None:
        with (workspace / marker).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(workspace)
        # Fails when somebody else has published the same name meanwhile: theirs stays, ours is no longer needed.
        try:
            workspace.rename(self.root / name)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            shutil.rmtree(workspace)
        _sync_folder(self.root)

    def names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith("."))

    def read_text(self, name: str, file: str) -> str | None:
        path = self.root / name / file
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def sizes(self, name: str) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.root / name).iterdir() if path.is_file()}

    def fetch(self, name: str) -> Path:
        return self.root / name

    def release(self, folder: Path) -> None:
        del folder  # it is the original

    def set_aside(self, name: str, marker: str) -> None:
        del marker
        if (self.root / name).exists():
            (self.root / name).rename(self.root / f"{_DAMAGED}{name}-{time.time_ns()}")

    def delete(self, name: str, marker: str) -> None:
        del marker  # a rename takes everything out of sight at once
        doomed = self.root / f"{_PARTIAL}{name}-deleted-{os.getpid()}"
        (self.root / name).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def folders(self) -> dict[str, dict[str, int]]:
        if not self.root.is_dir():
            return {}
        names = sorted(name for name in [p.name for p in self.root.iterdir()] if step_of_folder(name) is not None)
        return {name: self.sizes(name) for name in names}

    def read(self, folder: str, file: str) -> bytes | None:
        path = self.root / folder / file
        return path.read_bytes() if path.is_file() else None

    @contextlib.contextmanager
    def open(self, folder: str, file: str, bytes_: int) -> Iterator[Source]:
        del bytes_
        with (self.root / folder / file).open("rb", buffering=0) as opened:
            yield _OpenFile(opened.fileno())


class _OpenFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


class S3Storage:
    """Checkpoints below an S3 prefix. An object's name appears when it is whole; the marker's appears last."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.client = s3_client()

    def workspace(self, name: str, token: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{name}-{token}-"))

    def add(self, workspace: Path, name: str) -> None:
        for path in sorted(workspace.iterdir()):
            self.client.upload_file(str(path), self.bucket, f"{self.prefix}{name}/{path.name}")
        shutil.rmtree(workspace)

    def publish(self, workspace: Path, name: str, marker: str, text: str) -> None:
        del workspace
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}{name}/{marker}", Body=text.encode())

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix, Delimiter="/"
        )
        found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return sorted(prefix.removeprefix(self.prefix).rstrip("/") for prefix in found)

    def read_text(self, name: str, file: str) -> str | None:
        try:
            response = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}{name}/{file}")
        except self.client.exceptions.NoSuchKey:
            return None
        return str(response["Body"].read().decode())

    def sizes(self, name: str) -> dict[str, int]:
        return {
            key.rpartition("/")[2]: size for key, size in _objects(self.client, self.bucket, f"{self.prefix}{name}/")
        }

    def fetch(self, name: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        for key, _ in _objects(self.client, self.bucket, f"{self.prefix}{name}/"):
            self.client.download_file(self.bucket, key, str(folder / key.rpartition("/")[2]))
        return folder

    def release(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, name: str, marker: str) -> None:
        # S3 cannot rename. Without its marker the folder does not exist, and new files replace the old ones.
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}{name}/{marker}")

    def delete(self, name: str, marker: str) -> None:
        self.set_aside(name, marker)
        for key, _ in list(_objects(self.client, self.bucket, f"{self.prefix}{name}/")):
            self.client.delete_object(Bucket=self.bucket, Key=key)

    def folders(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for key, size in _objects(self.client, self.bucket, self.prefix):
            folder, _, file = key.removeprefix(self.prefix).partition("/")
            if file and step_of(folder) is not None:
                found.setdefault(folder, {})[file] = size
        return found

    def read(self, folder: str, file: str) -> bytes | None:
        text = self.read_text(folder, file)
        return None if text is None else text.encode()

    @contextlib.contextmanager
    def open(self, folder: str, file: str, bytes_: int) -> Iterator[Source]:
        del bytes_
        yield _Object(self.client, self.bucket, f"{self.prefix}{folder}/{file}")


class _Object:
    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self._client, self._bucket, self._key = client, bucket, key

    def read_at(self, offset: int, length: int) -> bytes:
        end = offset + length - 1
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key, Range=f"bytes={offset}-{end}")
        except self._client.exceptions.NoSuchKey:
            raise FileNotFoundError(self._key) from None
        return bytes(answer["Body"].read())


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


def copy_prefix(uri: str, folder: Path) -> int:
    """Copy the objects below an S3 uri to a folder, as File mode does; return their number."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = s3_client()
    # Names below the folder part of the prefix stay; a uri of one object brings that object.
    base = prefix if prefix.endswith("/") or not prefix else prefix + "/"
    count = 0
    for key, _ in _objects(client, bucket, prefix):
        if key.endswith("/"):
            continue
        name = key.removeprefix(base) if key.startswith(base) else key.rpartition("/")[2]
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(target))
        count += 1
    return count


def _objects(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            yield entry["Key"], entry["Size"]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    copied = copy_prefix(sys.argv[1], Path(sys.argv[2]))
    if copied == 0:
        sys.exit(f"nothing lies at {sys.argv[1]}")
