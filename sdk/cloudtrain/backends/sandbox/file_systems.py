"""File systems that jobs mount: each is a folder in the sandbox's home."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.sandbox.request_validation import validation_error

FOLDER = "file-systems"
"""Folder in the sandbox's home. It has one folder for each file system, and is kept when the sandbox ends."""


def mounted_folder(file_systems: Path, source: Mapping[str, Any]) -> Path:
    """Return the folder that a FileSystemDataSource stands for.

    Args:
        file_systems: The folder of all file systems.
        source: The FileSystemDataSource of a request.

    Raises:
        ServiceError: The folder does not exist.
    """
    root = file_systems / str(source["FileSystemId"])
    folder = root / str(source["DirectoryPath"]).lstrip("/")
    if not folder.is_dir() or not folder.resolve().is_relative_to(root.resolve()):
        raise validation_error(
            f"cloudtrain sandbox: the file system {source['FileSystemId']} has no folder {source['DirectoryPath']}: "
            f"create {folder} to mount it"
        )
    return folder
