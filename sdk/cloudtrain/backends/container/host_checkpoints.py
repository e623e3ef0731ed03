"""Checkpoint folders of several hosts: separate during a run and merged into one, as SageMaker does."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from cloudtrain.support.data_files import data_files
from cloudtrain_runtime.contract.manifest import MANIFEST_FILE, step_of_folder_name

_PARTIAL = ".merging-"


class HostCheckpoints:
    """Synchronises /opt/ml/checkpoints of several hosts like SageMaker.

    During a run each host sees only its own files. New and changed files of all hosts are copied to the merged folder;
    nothing is deleted there. Of files with the same name, the last copy remains.

    Args:
        merged: The folder that represents the job's S3 prefix.
        folders: The folders of the hosts, which do not exist yet.
    """

    def __init__(self, merged: Path, folders: Iterable[Path]) -> None:
        self._merged = merged
        self._copied: dict[Path, dict[str, tuple[int, int]]] = {folder: {} for folder in folders}
        self._seen: dict[Path, dict[str, tuple[int, int]]] = {}

    def restore(self) -> None:
        """Copy the merged folder to every host, without the checkpoints of the runtime.

        In S3, those are outside of the prefix that SageMaker restores.
        """
        self._merged.mkdir(parents=True, exist_ok=True)
        for folder in self._copied:
            shutil.copytree(self._merged, folder, ignore=_runtime_folders, dirs_exist_ok=True)
            self._copied[folder] = _identities(folder)

    def merge(self, *, is_final: bool = False) -> None:
        """Copy new and changed files; before the end, only files that are unchanged since the last call."""
        for folder, copied in self._copied.items():
            found = _identities(folder)
            seen = self._seen.get(folder, {})
            for name, identity in found.items():
                if copied.get(name) != identity and (is_final or seen.get(name) == identity):
                    try:
                        _replace(folder / name, self._merged / name)
                    except FileNotFoundError:  # deleted in the meantime
                        continue
                    copied[name] = identity
            self._seen[folder] = found


def _identities(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path, name in data_files(folder):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found[name] = (status.st_size, status.st_mtime_ns)
    return found


def _replace(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{_PARTIAL}{target.name}")
    try:
        shutil.copy2(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _runtime_folders(folder: str, names: list[str]) -> list[str]:
    """Return the folders with checkpoints of `cloudtrain_runtime.checkpoint`, complete or not."""
    return [
        name
        for name in names
        if step_of_folder_name(name.removeprefix(".writing-")) is not None and _has_manifest(Path(folder, name))
    ]


def _has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() or (folder / "writer.json").is_file()
