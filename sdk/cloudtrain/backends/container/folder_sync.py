"""Copies of a running job's checkpoints and other folders: separate on each host, and merged as SageMaker does."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from cloudtrain.backends.container.machine import DISK_FULL
from cloudtrain.support.data_files import data_files
from cloudtrain_runtime.contract.manifest import MANIFEST_FILE, step_of_folder_name

_PARTIAL = ".cloudtrain-merging-"


class FolderSync:
    """Copies new and changed files of a folder, as SageMaker does with /opt/ml/checkpoints.

    Nothing is deleted at the target. Files that vanish during a copy are skipped; files that change are copied again.

    Args:
        folder: The folder, which need not exist yet.
        copy: Copies a file, given its path and its name relative to the folder.
    """

    def __init__(self, folder: Path, copy: Callable[[Path, str], object]) -> None:
        self.folder = folder
        self._copy = copy
        self._copied: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def mark_copied(self) -> None:
        """Treat the present files as copied, because they come from the target."""
        self._copied = self._scan()

    def push(self, *, is_final: bool = False) -> None:
        """Copy new and changed files; before the end, only files that are unchanged since the last call.

        Raises:
            OSError: A file cannot be copied. Files of other folders are copied, unless the disk is full.
        """
        found = self._scan()
        errors = dict[str, OSError]()
        for name, identity in found.items():
            # A checkpoint without one of its files must not look complete.
            top = name.partition("/")[0]
            is_due = is_final or self._seen.get(name) == identity
            if self._copied.get(name) == identity or not is_due or top in errors:
                continue
            try:
                self._copy(self.folder / name, name)
            except FileNotFoundError:
                # Deleted in the meantime.
                continue
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                errors[top] = error
                continue
            self._copied[name] = identity
        self._seen = found
        if errors:
            raise next(iter(errors.values()))

    def _scan(self) -> dict[str, tuple[int, int]]:
        """Return size and modification time of the files."""
        found = {}
        for path, name in data_files(self.folder):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found[name] = (status.st_size, status.st_mtime_ns)
        return found


class HostCheckpoints:
    """Synchronises /opt/ml/checkpoints of several hosts like SageMaker.

    During a run each host sees only its own files. The files of all hosts are copied to the merged folder. Of files
    with the same name, the last copy remains.

    Args:
        merged: The folder that represents the job's S3 prefix.
        folders: The folders of the hosts, which do not exist yet.
    """

    def __init__(self, merged: Path, folders: Iterable[Path]) -> None:
        self._merged = merged
        self.folders = list(folders)
        self._syncs = [FolderSync(folder, self._copy) for folder in self.folders]

    def restore(self) -> None:
        """Copy the merged folder to every host, without the checkpoints of the runtime.

        In S3, those are outside of the prefix that SageMaker restores.
        """
        self._merged.mkdir(parents=True, exist_ok=True)
        for sync in self._syncs:
            shutil.copytree(self._merged, sync.folder, ignore=runtime_folders, dirs_exist_ok=True)
            sync.mark_copied()

    def merge(self, *, is_final: bool = False) -> None:
        """Copy new and changed files of all hosts (see `FolderSync.push`)."""
        errors = []
        for sync in self._syncs:
            try:
                sync.push(is_final=is_final)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _copy(self, source: Path, name: str) -> None:
        target = self._merged / name
        if _is_copy(source, target):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # The file's own name with a prefix could be too long.
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()
        partial = target.with_name(f"{_PARTIAL}{digest[:16]}")
        try:
            shutil.copy2(source, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _is_copy(source: Path, target: Path) -> bool:
    """Return whether a file has the size and the time of another one, which a copy gets."""
    try:
        found = target.stat()
    except FileNotFoundError:
        return False
    own = source.stat()
    return (own.st_size, own.st_mtime_ns) == (found.st_size, found.st_mtime_ns)


def runtime_folders(folder: str, names: list[str]) -> list[str]:
    """Return the folders with checkpoints of `cloudtrain_runtime.checkpoint`, complete or not."""
    return [
        name
        for name in names
        if step_of_folder_name(name.removeprefix(".writing-")) is not None
        and any(Path(folder, name, file).is_file() for file in (MANIFEST_FILE, "writer.json"))
    ]
