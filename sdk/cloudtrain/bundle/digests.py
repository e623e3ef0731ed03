"""Cache of file digests, so that commands do not read an unchanged code folder again.

An entry is valid while size, times and inode of its file are unchanged. As in git's index, a file that changed just
before it was read is not cached: it could change again within the same tick of the file system's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.secrets import scanner
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.file_pointers import PointerKind, pointer_kind
from cloudtrain.support.home_folder import make_home
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

FILE_PREFIX = "digests-"
CLOCK_TICK_NS = 2 * 10**9
"""Resolution of the coarsest file system clock in use, FAT's."""
_MIN_CACHED_BYTES = 16 * 10**6
_MIN_CACHED_FILES = 1000
"""Smaller folders are read so fast that a cache file is not worth writing."""
_CHUNK_BYTES = 2**20


class Digest(NamedTuple):
    """What a file's content is.

    Attributes:
        sha256: Hexadecimal digest.
        size: Bytes that were read.
        credentials: Credentials in them as (line, kind). The line is 0 in a file that is no text.
        pointer: What stands in for the content, if the file is there by name only.
    """

    sha256: str
    size: int
    credentials: tuple[tuple[int, str], ...]
    pointer: PointerKind | None


class Digests:
    """Digests of the files of one code folder.

    Args:
        root: The code folder.
        folder: Folder of the cache file, below the folder of local runs, or None for no cache.
    """

    def __init__(self, root: Path, folder: Path | None) -> None:
        self._file: Path | None = None
        if folder is not None:
            digest = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]
            self._file = folder / f"{FILE_PREFIX}{digest}.json"
        self._known = self._load()
        self._kept: dict[str, tuple[list[int], Digest]] = {}
        self._read_bytes = self._read_files = 0

    def of(
        self,
        name: str,
        path: str,
        status: os.stat_result,
        *,
        target: str | None = None,
        is_own: bool = False,
    ) -> Digest:
        """Return a file's digest, from the cache if the file is unchanged.

        Args:
            name: Key in the cache.
            path: The file.
            status: Its status, taken before this call.
            target: Target of a symbolic link; its name decides how the content is scanned.
            is_own: Whether the file is cloudtrain's own, which is not searched for credentials.

        Raises:
            OSError: The file cannot be read.
        """
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            self._kept[name] = known
            return known[1]
        started_ns = time.time_ns()
        digest = read_digest(path, name if target is None else target, is_own=is_own)
        self._read_bytes += digest.size
        self._read_files += 1
        # A file that changes within one tick of the clock after it was read would have the same stamp.
        is_settled = max(status.st_mtime_ns, status.st_ctime_ns) < started_ns - CLOCK_TICK_NS
        if is_settled and digest.size == status.st_size:
            self._kept[name] = (stamp, digest)
        return digest

    def save(self) -> None:
        """Write the cache if that saves time. An unwritable folder is no error."""
        has_read_little = (
            self._read_bytes < _MIN_CACHED_BYTES and self._read_files < _MIN_CACHED_FILES
        )
        if self._file is None or has_read_little:
            return
        content = {
            "version": scanner.VERSION,
            "files": {name: [stamp, list(digest)] for name, (stamp, digest) in self._kept.items()},
        }
        with contextlib.suppress(OSError):
            make_home(self._file.parent.parent)
            self._file.parent.mkdir(exist_ok=True)
            write_atomically(self._file, dump_json(content, separators=(",", ":")))

    def _load(self) -> dict[str, tuple[list[int], Digest]]:
        if self._file is None:
            return {}
        try:
            content = load_json(self._file.read_bytes())
            if content["version"] != scanner.VERSION:
                return {}
            return {
                name: (stamp, _as_digest(*fields))
                for name, (stamp, fields) in content["files"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # Absent, of another version, or damaged: read all files again.
            return {}


def _as_digest(sha256: Any, size: Any, credentials: Any, pointer: Any) -> Digest:
    """Return a digest of the cache file, which something else may have written."""
    return Digest(
        sha256=str(sha256),
        size=int(size),
        credentials=tuple((int(line), str(kind)) for line, kind in credentials),
        pointer=None if pointer is None else PointerKind(*map(str, pointer)),
    )


def forget(folder: Path) -> None:
    """Delete all cache files in a folder, because an entry was wrong."""
    for path in folder.glob(f"{FILE_PREFIX}*.json"):
        path.unlink(missing_ok=True)


def read_digest(path: str, name: str, *, is_own: bool = False) -> Digest:
    """Read a file once, for its digest and for credentials in it. `name` decides how the content is scanned.

    cloudtrain's own files have neither credentials nor pointers, and each plan reads them: they are not searched.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:  # noqa: PTH123 (called for every file; a Path costs as much as the rest)
        # Not simply as much as is scanned: Python allocates what is asked for, which takes longer than to read the file.
        expected = min(os.fstat(file.fileno()).st_size + 1, scanner.SCANNED_BYTES)
        data = file.read(expected)
        if len(data) == expected:
            # Longer than scanned, or than it was a moment ago.
            data += file.read(scanner.SCANNED_BYTES - expected)
        digest = hashlib.sha256(data)
        size = len(data)
        found = () if is_own else tuple(scanner.scan_file(name, data))
        pointer = None if is_own else pointer_kind(data)
        del data
        while size >= scanner.SCANNED_BYTES and (chunk := file.read(_CHUNK_BYTES)):
            digest.update(chunk)
            size += len(chunk)
    return Digest(digest.hexdigest(), size, found, pointer)
