"""Folders that the service keeps in step with S3 while a job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloudtrain.aws.s3_download import download
from cloudtrain.support.s3_uri import split_uri

USER_AGENT = "cloudtrain-sandbox-service"
"""Marks the service's own calls, which the weather spares: in AWS they are not the user's either."""


class S3FolderSync:
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
            DownloadError: S3 refuses, or a key leaves the folder.
        """
        download(self._s3, f"s3://{self._bucket}/{self._prefix}", self._folder)
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
