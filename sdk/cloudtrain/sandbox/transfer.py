"""What the service copies between S3 and its instances: channels, checkpoints, artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.request import split_uri

USER_AGENT = "cloudtrain-sandbox-service"
"""Marks the service's own calls, which the weather spares: in AWS they are not the user's either."""


class TransferError(Exception):
    """An object cannot be brought. The message goes to FailureReason."""


def fetch_prefix(s3: Any, uri: str, folder: Path) -> int:
    """Copy the objects below an S3 uri to a folder as File mode does; return their number.

    Raises:
        TransferError: a key would leave the folder, or S3 refuses.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, prefix = split_uri(uri)
    folder.mkdir(parents=True, exist_ok=True)
    # Names below the folder part of the prefix stay; a uri of one object brings that object.
    base = prefix if prefix.endswith("/") or not prefix else f"{prefix}/"
    count = 0
    try:
        for key in list_keys(s3, bucket, prefix):
            if key.endswith("/"):
                continue
            name = key.removeprefix(base) if key.startswith(base) else key.rpartition("/")[2]
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise TransferError(f"ClientError: Data download failed: the key {key!r} leaves its channel")
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(target))
            count += 1
    except (ClientError, BotoCoreError, OSError) as error:
        raise TransferError(f"ClientError: Data download failed: {uri}: {error}") from None
    return count


def list_keys(s3: Any, bucket: str, prefix: str) -> Iterator[str]:
    """Yield the keys below a prefix, in S3's order."""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            yield entry["Key"]


class Mirror:
    """Copies what changes in a folder to an S3 prefix, as SageMaker does with /opt/ml/checkpoints.

    Nothing is deleted in S3. What is deleted here, or changes while it is copied, is taken again or left out.
    """

    def __init__(self, s3: Any, folder: Path, uri: str) -> None:
        self._s3 = s3
        self._folder = folder
        self._bucket, prefix = split_uri(uri)
        self._prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
        self._sent: dict[Path, tuple[int, int]] = {}
        self._seen: dict[Path, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Bring what lies in S3 to the folder.

        Raises:
            TransferError: S3 refuses.
        """
        fetch_prefix(self._s3, f"s3://{self._bucket}/{self._prefix}", self._folder)
        self._sent = self._scan()

    def push(self, *, final: bool = False) -> None:
        """Copy the files that are new or have changed; while the job runs, only those that rest since the last time."""
        found = self._scan()
        for path, identity in found.items():
            rests = final or self._seen.get(path) == identity
            if rests and self._sent.get(path) != identity:
                try:
                    self._s3.upload_file(
                        str(path), self._bucket, self._prefix + path.relative_to(self._folder).as_posix()
                    )
                except FileNotFoundError:
                    continue  # deleted meanwhile
                self._sent[path] = identity
        self._seen = found

    def _scan(self) -> dict[Path, tuple[int, int]]:
        found = {}
        for path in sorted(self._folder.rglob("*")):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                found[path] = (status.st_size, status.st_mtime_ns)
        return found
