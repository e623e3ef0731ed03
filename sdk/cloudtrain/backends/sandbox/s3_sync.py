"""Synchronization of a job's folders with S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloudtrain.aws.s3_download import download
from cloudtrain.support.s3_uri import split_uri

USER_AGENT = "cloudtrain-sandbox-service"
"""Marks the sandbox's own calls, which get no injected faults: in AWS they are not the user's calls either."""


class S3FolderSync:
    """Copies changed files of a folder to an S3 prefix, as SageMaker does with /opt/ml/checkpoints.

    Objects in S3 are never deleted. Files that vanish during a copy are skipped; files that change are copied again.
    """

    def __init__(self, s3: Any, folder: Path, uri: str) -> None:
        self._s3 = s3
        self._folder = folder
        self._bucket, prefix = split_uri(uri)
        self._prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
        self._sent: dict[Path, tuple[int, int]] = {}
        self._seen: dict[Path, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Download the prefix to the folder.

        Raises:
            DownloadError: S3 rejected the request, or a key is outside of the folder.
        """
        download(self._s3, f"s3://{self._bucket}/{self._prefix}", self._folder)
        self._sent = self._scan()

    def push(self, *, final: bool = False) -> None:
        """Copy new and changed files. Unless `final`, skip files that changed since the last call."""
        found = self._scan()
        for path, identity in found.items():
            is_stable = final or self._seen.get(path) == identity
            if is_stable and self._sent.get(path) != identity:
                try:
                    self._s3.upload_file(
                        str(path), self._bucket, self._prefix + path.relative_to(self._folder).as_posix()
                    )
                except FileNotFoundError:
                    continue  # deleted since the scan
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
