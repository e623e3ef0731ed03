"""Copies of a run's files from folders and S3: verified, resumable, and never over a file with other content."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_download import fetch_objects, find_objects, names_file, stored_digest
from cloudtrain.aws.s3_objects import get_object
from cloudtrain.errors import CloudError, DamagedCheckpointError, UserError
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.s3_uri import split_uri
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract.aws_codes import MISSING_OBJECT
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.manifest import Checksums, Manifest

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

    from cloudtrain.bundle import ProgressCallback

SUMS_FILE = "SHA256SUMS"
"""Record of the SHA-256 of each file, which `sha256sum -c` verifies."""

_STAGING = ".cloudtrain-download-"
"""Begin of the name of a folder for unfinished copies."""

_CHUNK_BYTES = 2**20
_SHOWN = 3
_RECORDED = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_DELETED = "the run has deleted it meanwhile: repeat the command, which leaves out files that are here already"

Fetch = tuple[str, Path]
"""The name of a file in its source, and the path for its copy."""
Fetched = Generator[None, None, None]


class Digest(NamedTuple):
    """A known digest: `sha256`, `md5` or `crc32` in hexadecimal digits, or `manifest` with the manifest."""

    algorithm: str
    value: str
    manifest: Manifest | None = None

    def matches(self, path: Path) -> bool:
        """Return whether a file has this digest."""
        if self.manifest is None:
            return _hex_digest(path, self.algorithm) == self.value
        sums = Checksums(self.manifest.block_bytes)
        for chunk in _chunks(path):
            sums.update(chunk)
        return sums.result() == self.manifest.files[self.value]


class Source(Protocol):
    """A folder with files of a run."""

    uri: str

    def files(self) -> Iterator[tuple[str, int, float]]:
        """Yield name, size in bytes and modification time of each file below the folder."""

    def digest(self, name: str) -> Digest | None:
        """Return the known digest of a file, or None."""

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""

    def fetch(self, wanted: Sequence[Fetch], on_bytes: Callable[[int], object]) -> Fetched:
        """Copy files; yield after each one, in their order."""


def open_source(uri: str, make_s3: Callable[[], S3Client]) -> Source:
    """Return the folder at a `file:///` or `s3://` uri, or at a path."""
    if uri.startswith("s3://"):
        return _S3Source(uri, make_s3)
    if uri.startswith("file:"):
        return _FolderSource(path_of(uri))
    return _FolderSource(Path(uri))


class _FolderSource:
    """A folder of this machine. Links that leave it are left out, and links to folders."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.uri = str(root)

    def files(self) -> Iterator[tuple[str, int, float]]:
        for at, folders, names in os.walk(self.root):
            folders.sort()
            for path in sorted(Path(at, name) for name in names):
                # A run may delete it.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and path.resolve().is_relative_to(self.root):
                        found = path.stat()
                        yield path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime

    def digest(self, name: str) -> Digest:
        with user_errors():
            return Digest("sha256", _hex_digest(self.root / name, "sha256"))

    def read(self, name: str) -> bytes:
        with user_errors():
            return (self.root / name).read_bytes()

    def fetch(self, wanted: Sequence[Fetch], on_bytes: Callable[[int], object]) -> Fetched:
        for name, target in wanted:
            with user_errors(), target.open("wb") as copy:
                for chunk in _chunks(self.root / name):
                    copy.write(chunk)
                    on_bytes(len(chunk))
            yield


class _S3Source:
    """A folder in S3: the keys that begin with its uri and a slash."""

    def __init__(self, uri: str, make_s3: Callable[[], S3Client]) -> None:
        self.uri = f"{uri.rstrip('/')}/"
        self._make_s3 = make_s3
        self._bucket, self._prefix = split_uri(self.uri)

    def files(self) -> Iterator[tuple[str, int, float]]:
        with self._errors("list"):
            for found in find_objects(self._make_s3(), self.uri):
                yield found.name, found.bytes, found.modified

    def digest(self, name: str) -> Digest | None:
        with self._errors("read"):
            found = stored_digest(self._make_s3(), self.uri + name)
        return None if found is None else Digest(*found)

    def read(self, name: str) -> bytes:
        with self._errors("read"):
            return get_object(self._make_s3(), self.uri + name).body

    def fetch(self, wanted: Sequence[Fetch], on_bytes: Callable[[int], object]) -> Fetched:
        objects = [(self._bucket, self._prefix + name, target) for name, target in wanted]
        with self._errors("download"):
            yield from fetch_objects(self._make_s3(), objects, on_bytes)

    def _errors(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return aws_errors(
            f"{verb} the files at {self.uri}", dict.fromkeys(MISSING_OBJECT, _DELETED)
        )


@dataclass(frozen=True)
class SourceFile:
    """A file to copy.

    Attributes:
        path: Its path below the target, with `/` between the parts.
        source: The folder that has it.
        name: Its name there.
        bytes: Its size.
        modified: When it was modified, in seconds since the epoch.
        manifest: Manifest of the checkpoint, if it is a file of one.
    """

    path: str
    source: Source
    name: str
    bytes: int
    modified: float
    manifest: Manifest | None = None

    def digest(self) -> Digest | None:
        """Return the best known digest, or None."""
        name = self.name.rpartition("/")[2]
        if self.manifest is not None and name in self.manifest.files:
            return Digest("manifest", name, self.manifest)
        return self.source.digest(self.name)


@dataclass(frozen=True)
class CopiedFile:
    """A file in the target.

    Attributes:
        path: Its path below the target.
        bytes: Its size.
        sha256: Its SHA-256 in hexadecimal digits.
        verified: What it was compared with: `manifest`, `sha256`, `md5`, `crc32`, or `size` where no digest is known.
        is_new: False for a file that was there already.
    """

    path: str
    bytes: int
    sha256: str
    verified: str
    is_new: bool


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Create the target, and a folder in it for unfinished copies, which is deleted at the end.

    Raises:
        UserError: the target cannot be written, or another download writes to it.
    """
    with user_errors():
        target.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with user_errors():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another download writes to {target}", "wait for it, or use --to DIR"
                ) from None
            # By downloads that were killed.
            for left in target.glob(f"{_STAGING}*"):
                shutil.rmtree(left, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=target))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(descriptor)


def copy_files(
    files: Sequence[SourceFile],
    staging: Path,
    *,
    force: bool,
    progress: ProgressCallback | None = None,
) -> list[CopiedFile]:
    """Copy files into the folder that contains `staging`; files that are there already are kept.

    A file appears under its name when it is complete and verified.

    Args:
        files: The files, in the order in which they appear.
        staging: Folder for unfinished copies.
        force: Replace files with other content.
        progress: Callback `(bytes_done, bytes_total)`.

    Raises:
        UserError: a name is unsafe, a file with other content exists, or the target cannot be written.
        DamagedCheckpointError: a file differs from the manifest of its checkpoint.
        CloudError: S3 refused or cannot be reached, or an object differs from its checksum.
    """
    target = staging.parent
    _check_names(files)
    recorded = _read_sums(target)
    copied = {
        each.path: found
        for each in files
        if (found := _find_equal(each, target, recorded)) is not None
    }
    todo = [each for each in files if each.path not in copied]
    if different := [
        each.path for each in todo if not force and os.path.lexists(target / each.path)
    ]:
        names = ", ".join(different[:_SHOWN])
        if len(different) > _SHOWN:
            names += f" and {len(different) - _SHOWN} more"
        raise UserError(
            f"{target} has other files of these names; nothing was copied: {names}",
            "to replace them: --force; to keep them: --to DIR",
        )
    _check_space(todo, target)
    count = _make_counter(progress, sum(each.bytes for each in todo))
    try:
        for source, group in itertools.groupby(todo, key=lambda each: each.source):
            of_source = list(group)
            wanted = [(each.name, staging / str(index)) for index, each in enumerate(of_source)]
            with contextlib.closing(source.fetch(wanted, count)) as fetched:
                for each, (_, path), _ in zip(of_source, wanted, fetched, strict=True):
                    copied[each.path] = _install(each, path, target / each.path)
    finally:
        _write_sums(target, {path: each.sha256 for path, each in copied.items()})
    return [copied[each.path] for each in files]


def _check_names(files: Sequence[SourceFile]) -> None:
    """Raise a UserError for a name that leaves the target, that a record cannot hold, or that occurs twice."""
    seen: set[str] = set()
    for each in files:
        first = each.path.split("/")[0]
        is_hidden = first == SUMS_FILE or first.startswith(_STAGING)
        if (
            not names_file(each.path)
            or not each.path.isprintable()
            or is_hidden
            or each.path in seen
        ):
            raise UserError(
                f"{each.source.uri} has a file whose name cannot be used here: {each.name!r}; nothing was copied",
                "leave it out with --what, or rename it there",
            )
        seen.add(each.path)


def _find_equal(file: SourceFile, target: Path, recorded: Mapping[str, str]) -> CopiedFile | None:
    """Return the file in the target if it is there with the same content, else None."""
    path = target / file.path
    with user_errors():
        if path.is_symlink() or not path.is_file() or path.stat().st_size != file.bytes:
            return None
        digest = file.digest()
        own = _hex_digest(path, "sha256")
        if digest is None:
            # Compare with what an earlier download has recorded.
            is_equal = path.stat().st_mtime == file.modified and recorded.get(file.path, own) == own
        else:
            is_equal = digest.matches(path)
    if not is_equal:
        return None
    return CopiedFile(
        path=file.path,
        bytes=file.bytes,
        sha256=own,
        verified=digest.algorithm if digest else "size",
        is_new=False,
    )


def _install(file: SourceFile, copy: Path, path: Path) -> CopiedFile:
    """Verify a copy and move it to its place."""
    digest = file.digest()
    place = f"{file.source.uri.rstrip('/')}/{file.name}"
    with user_errors():
        is_intact = copy.stat().st_size == file.bytes and (digest is None or digest.matches(copy))
        if not is_intact:
            if digest is not None and digest.manifest is not None:
                hint = "verify the checkpoints: cloudtrain checkpoints verify RUN"
                raise DamagedCheckpointError(
                    f"{place} differs from the manifest of its checkpoint", hint
                )
            kind = CloudError if place.startswith("s3://") else UserError
            hint = "repeat the command, which leaves out the files that are here already"
            raise kind(f"{place} has changed while it was read, or was damaged on its way", hint)
        found = CopiedFile(
            path=file.path,
            bytes=file.bytes,
            sha256=_hex_digest(copy, "sha256"),
            verified=digest.algorithm if digest else "size",
            is_new=True,
        )
        os.utime(copy, (file.modified, file.modified))
        path.parent.mkdir(parents=True, exist_ok=True)
        copy.replace(path)
    return found


def _check_space(files: Sequence[SourceFile], target: Path) -> None:
    needed = sum(each.bytes for each in files)
    free = shutil.disk_usage(target).free
    if needed > free:
        message = f"{target} has {format_size(free)} left, and the files have {format_size(needed)}; nothing was copied"
        raise UserError(
            message, "choose another disk with --to DIR, or less with --what or --step last"
        )


def _read_sums(target: Path) -> dict[str, str]:
    matches = map(_RECORDED.fullmatch, _read_lines(target))
    return {match[2]: match[1] for match in matches if match}


def _read_lines(target: Path) -> list[str]:
    with user_errors(), contextlib.suppress(FileNotFoundError):
        text = (target / SUMS_FILE).read_bytes().decode("utf-8", "surrogateescape")
        if text:
            return text.removesuffix("\n").split("\n")
    return []


def _write_sums(target: Path, sums: Mapping[str, str]) -> None:
    """Record digests. Lines about other files stay as they are: the file may be the user's."""
    kept = [
        line
        for line in _read_lines(target)
        if (match := _RECORDED.fullmatch(line)) is None or match[2] not in sums
    ]
    lines = [*kept, *(f"{sums[path]}  {path}" for path in sorted(sums))]
    with user_errors():
        write_atomically(
            target / SUMS_FILE, "".join(f"{line}\n" for line in lines), errors="surrogateescape"
        )


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _hex_digest(path: Path, algorithm: str) -> str:
    if algorithm == "crc32":
        value = 0
        for chunk in _chunks(path):
            value = zlib.crc32(chunk, value)
        return f"{value:08x}"
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors of local files into user errors."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}", "choose another folder: --to DIR"
        ) from None


def _make_counter(progress: ProgressCallback | None, total: int) -> Callable[[int], None]:
    """Return a thread-safe callback for copied bytes."""
    done = 0
    lock = threading.Lock()

    def count(step: int) -> None:
        nonlocal done
        with lock:
            done += step
            if progress is not None:
                progress(done, total)

    return count
