"""Checkpoints in the format of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader

from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.storage import Storage
from cloudtrain_runtime.verified import open_verified


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint and compares every block with the manifest before it is used."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        super().__init__(folder)
        self.fs: FileSystemBase = _Read(storage, folder, manifest)  # type: ignore[assignment]


class _Read(FileSystemBase):
    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._storage, self._folder, self._manifest = storage, folder, manifest

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        del mode
        with open_verified(self._storage, self._folder, self._manifest, str(path)) as file:
            yield file

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        del path
        return suffix

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        del path
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return True
