"""Storage of checkpoints, on a file system or in S3. Without torch."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract.checkpoint_folder import WRITING_PREFIX, step_of_folder
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.machine_paths import machine_path
from cloudtrain_runtime.contract.manifest import (
    MANIFEST_FILE,
    checkpoint_folder_name,
    step_of_folder_name,
)
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.s3.objects import ObjectReader, ObjectWriter, S3Objects

WRITER_FILE = "writer.json"
"""First file of a checkpoint: which run and attempt writes it. In S3 it reserves the folder's name for that attempt."""

_FULL = "there is no room left: free some, lower checkpoint.keep (one more is there while it is written), or take more"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "files may not be as large as a checkpoint's: raise the limit (ulimit -f)",
    errno.EROFS: "the disk may only be read: choose another checkpoint.uri",
    errno.EACCES: "this user may not write there: choose another checkpoint.uri, or change its owner",
}

_DELETING = ".deleting-"

StepOf = Callable[[str], int | None]


class FolderStorage:
    """Checkpoints below a folder that all ranks share. An unfinished one has a hidden name until a rename.

    One rank reserves a folder, all ranks create their files in it, and one rank commits it with the manifest. Two
    writers never share a folder, so no writer can damage another one's data.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = machine_path(self.root, os.environ).as_uri()

    def folders(self, step_of: StepOf = step_of_folder) -> dict[str, dict[str, int]]:
        """Return folders by name, with the sizes in bytes of all files below them by path.

        Args:
            step_of: Returns the step of a checkpoint's folder, finished or not, by its name; None for others.
        """
        try:
            paths = sorted(self.root.iterdir())
        except FileNotFoundError:
            # Only this error means that there are none: a failing disk may hold the run's checkpoints.
            return {}
        wanted = (path for path in paths if step_of(path.name) is not None and path.is_dir())
        return {path.name: _sizes(path) for path in wanted}

    def read(self, folder: str, file: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        try:
            return (self.root / folder / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    @contextlib.contextmanager
    def open(self, folder: str, file: str, bytes_: int) -> Iterator[ObjectReader]:
        """Open a file of that size to read it in pieces; raise FileNotFoundError if there is none."""
        # Only a reader of S3 needs it: an open file has its size.
        del bytes_
        with (self.root / folder / file).open("rb", buffering=0) as opened:
            yield _RawFile(opened.fileno())

    def write(self, folder: str, file: str, data: bytes) -> None:
        """Write a small file, durably."""
        with self.create(folder, file) as writer:
            writer.write(data)

    def reserve(self, step: int, writer: Mapping[str, Any]) -> str:
        """Return the name of a folder for a step that only this writer writes to.

        `writer` has `run` and `attempt` (8 hex digits, different for each start of a group of ranks).
        """
        folder = f"{WRITING_PREFIX}{checkpoint_folder_name(step, writer['attempt'])}"
        # A failed save of the same attempt may have left the folder.
        shutil.rmtree(self.root / folder, ignore_errors=True)
        with self._explained():
            (self.root / folder).mkdir(parents=True)
        self.write(folder, WRITER_FILE, dump_json(dict(writer)).encode())
        return folder

    @contextlib.contextmanager
    def create(self, folder: str, file: str) -> Iterator[ObjectWriter]:
        """Write a file of a reserved folder; it is durable when the block has ended."""
        with self._explained(), (self.root / folder / file).open("wb", buffering=0) as opened:
            yield _RawFile(opened.fileno())
            os.fsync(opened.fileno())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _ADVICE:
                raise
            raise OSError(
                error.errno, f"{_ADVICE[error.errno]} ({error.strerror})", str(self.root)
            ) from error

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the files in a folder."""
        return _sizes(self.root / folder)

    def abandon(self, folder: str) -> None:
        """Discard a reserved folder after a failed save, so that it does not use the space of the next one."""
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def commit(self, folder: str, manifest: str) -> str:
        """Write the manifest; return the final folder name of the checkpoint."""
        self.write(folder, MANIFEST_FILE, manifest.encode())
        _sync_folder(self.root / folder)
        full = folder.removeprefix(WRITING_PREFIX)
        name = checkpoint_folder_name(step_of_folder_name(full) or 0)
        try:
            (self.root / folder).rename(self.root / name)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            # Another attempt has completed this step already.
            name = full
            (self.root / folder).rename(self.root / name)
        _sync_folder(self.root)
        return name

    def delete(self, folder: str) -> None:
        """Delete a checkpoint. If interrupted, the rest counts as unfinished."""
        # The rename hides the checkpoint atomically. Remains of an interrupted deletion are
        # deleted, too.
        (self.root / folder).rename(self.root / f"{_DELETING}{folder}-{os.getpid()}")
        for path in self.root.iterdir():
            if _is_rest(path):
                _delete_folder(path)


class _RawFile:
    """An unbuffered file. The operating system may read or write less per call; these methods do not."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_at(self, offset: int, length: int) -> bytes:
        pieces = []
        while length > 0 and (piece := os.pread(self._descriptor, length, offset)):
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        while view:
            view = view[os.write(self._descriptor, view) :]


def _is_rest(folder: Path) -> bool:
    """Return whether a folder is the rest of a checkpoint whose deletion was interrupted."""
    name, _, process = folder.name.removeprefix(_DELETING).rpartition("-")
    is_named_so = folder.name.startswith(_DELETING) and process.isdecimal()
    if not is_named_so or step_of_folder(name) is None:
        return False
    files = (WRITER_FILE, MANIFEST_FILE)
    with contextlib.suppress(OSError):
        return any((folder / file).is_file() for file in files) or not any(folder.iterdir())
    return False


def _delete_folder(folder: Path) -> None:
    """Delete a checkpoint's folder; an interruption or an error leaves the writer, which identifies it."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == WRITER_FILE):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        folder.rmdir()


def _sizes(folder: Path) -> dict[str, int]:
    def fail(error: OSError) -> None:
        # A folder may disappear while it is listed: another attempt has renamed or deleted it.
        if not isinstance(error, FileNotFoundError):
            raise error

    found = {}
    for parent, _, names in os.walk(folder, onerror=fail):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class S3Storage:
    """Checkpoints below an S3 prefix, with the methods of a FolderStorage.

    A folder's name belongs to the attempt that first wrote into it.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._objects = S3Objects(self.uri)

    def folders(self, step_of: StepOf = step_of_folder) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for key, size in self._objects.sizes("").items():
            folder, _, file = key.partition("/")
            # Folders that were copied from a local run while they were written are no checkpoints
            # of this prefix.
            is_checkpoint = step_of(folder) is not None and not folder.startswith(WRITING_PREFIX)
            if file and is_checkpoint:
                found.setdefault(folder, {})[file] = size
        return dict(sorted(found.items()))

    def read(self, folder: str, file: str) -> bytes | None:
        return self._objects.read(f"{folder}/{file}")

    def open(self, folder: str, file: str, bytes_: int) -> AbstractContextManager[ObjectReader]:
        return self._objects.open(f"{folder}/{file}", bytes_)

    def write(self, folder: str, file: str, data: bytes) -> None:
        self._objects.put(f"{folder}/{file}", data)

    def reserve(self, step: int, writer: Mapping[str, Any]) -> str:
        identity = dump_json(dict(writer)).encode()
        for name in (checkpoint_folder_name(step), checkpoint_folder_name(step, writer["attempt"])):
            key = f"{name}/{WRITER_FILE}"
            # An earlier failed save of this attempt may have reserved it.
            is_own = self._objects.put_new(key, identity) or self._objects.read(key) == identity
            # A partly deleted checkpoint, or one from another program, may lack the writer file.
            if is_own and self._objects.read(f"{name}/{MANIFEST_FILE}") is None:
                return name
        raise FileExistsError(
            f"{self.uri}/{checkpoint_folder_name(step, writer['attempt'])} is taken"
        )

    def create(self, folder: str, file: str) -> AbstractContextManager[ObjectWriter]:
        return self._objects.create(f"{folder}/{file}")

    def sizes(self, folder: str) -> dict[str, int]:
        return {
            key.removeprefix(f"{folder}/"): size
            for key, size in self._objects.sizes(f"{folder}/").items()
        }

    def abandon(self, folder: str) -> None:
        """Do nothing: space is unlimited, and an unresponsive S3 would only delay the next save."""

    def commit(self, folder: str, manifest: str) -> str:
        key = f"{folder}/{MANIFEST_FILE}"
        if not self._objects.put_new(key, manifest.encode()):
            raise FileExistsError(f"{self.uri}/{folder} has a manifest already")
        if self._objects.read(key) != manifest.encode():
            self._objects.delete([key])
            raise OSError(
                f"{self.uri}/{key} was written and reads back differently: the storage loses data"
            )
        return folder

    def delete(self, folder: str) -> None:
        # Without its manifest a checkpoint does not exist. The writer file is deleted last: it
        # identifies the owner.
        self._objects.delete([f"{folder}/{MANIFEST_FILE}"])
        rest = [
            key for key in self._objects.sizes(f"{folder}/") if not key.endswith(f"/{WRITER_FILE}")
        ]
        self._objects.delete(rest)
        self._objects.delete([f"{folder}/{WRITER_FILE}"])


Storage = FolderStorage | S3Storage


def open_storage(uri: str) -> Storage:
    """Return the storage at a `file:///`, `s3://` uri or a plain path."""
    if uri.startswith("s3://"):
        return S3Storage(uri)
    return FolderStorage(path_of(uri))
