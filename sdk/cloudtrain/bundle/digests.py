"""Digests of files, remembered between commands, so that an unchanged tree is not read again.

An entry counts as long as size, times and inode of its file are what they were. As in git's index, a file that changed
just before it was read is not remembered: it could change again within the same tick of the file system's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from cloudtrain.secrets import scanner
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.strict_json import dump_json

FILE_PREFIX = "digests-"
_TICK_NS = 2 * 10**9
"""The coarsest clock of a file system in use, FAT's."""
_WORTH_BYTES, _WORTH_FILES = 16 * 10**6, 1000
"""Trees that are read in a blink leave nothing on the disk."""
_CHUNK_BYTES = 2**20


class Digest(NamedTuple):
    """What is known of a file's content.

    Attributes:
        sha256: Hexadecimal digest.
        size: Bytes that were read.
        credentials: (line, kind) of what looks like a credential; line 0 of what is no text.
    """

    sha256: str
    size: int
    credentials: tuple[tuple[int, str], ...]


class Digests:
    """Digests of the files of one code folder.

    Args:
        root: The code folder.
        folder: Where they are remembered, or None.
    """

    def __init__(self, root: Path, folder: Path | None) -> None:
        digest = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]
        self._file = folder / f"{FILE_PREFIX}{digest}.json" if folder is not None else None
        self._known = self._load()
        self._kept: dict[str, tuple[list[int], Digest]] = {}
        self._read_bytes = self._read_files = 0

    def of(self, name: str, path: str, status: os.stat_result, *, target: str | None = None) -> Digest:
        """Return a file's digest, from memory where the file is unchanged.

        Args:
            name: The key.
            path: The file.
            status: Its status, taken before.
            target: Where it is a link: the path of what it leads to, whose name tells how to read it.

        Raises:
            OSError: it cannot be read.
        """
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            self._kept[name] = known
            return known[1]
        began = time.time_ns()
        digest = read_digest(path, name if target is None else target)
        self._read_bytes += digest.size
        self._read_files += 1
        if max(status.st_mtime_ns, status.st_ctime_ns) < began - _TICK_NS and digest.size == status.st_size:
            self._kept[name] = (stamp, digest)
        return digest

    def save(self) -> None:
        """Remember what was read, where that saves time. A folder that cannot be written to is no error."""
        if self._file is None or (self._read_bytes < _WORTH_BYTES and self._read_files < _WORTH_FILES):
            return
        content = {
            "version": scanner.VERSION,
            "files": {name: [stamp, list(digest)] for name, (stamp, digest) in self._kept.items()},
        }
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            ignore = self._file.parent / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
            write_atomically(self._file, dump_json(content, separators=(",", ":")))

    def _load(self) -> dict[str, tuple[list[int], Digest]]:
        if self._file is None:
            return {}
        try:
            content = json.loads(self._file.read_bytes())
            if content["version"] != scanner.VERSION:
                return {}
            return {
                name: (stamp, Digest(str(sha256), int(size), tuple((int(line), str(kind)) for line, kind in found)))
                for name, (stamp, (sha256, size, found)) in content["files"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # absent, of another version, or damaged: everything is read again


def forget(folder: Path) -> None:
    """Drop all that is remembered in a folder: something there was wrong."""
    for path in folder.glob(f"{FILE_PREFIX}*.json"):
        path.unlink(missing_ok=True)


def read_digest(path: str, name: str) -> Digest:
    """Read a file once, for its digest and for what looks like a credential in it.

    Args:
        path: The file.
        name: The name by which `credentials.in_file` knows how to read it.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:  # noqa: PTH123 (ten thousand times; a Path costs as much as the rest)
        data = file.read(scanner.SCANNED_BYTES)
        digest, size = hashlib.sha256(data), len(data)
        found = tuple(scanner.scan_file(name, data))
        del data
        while size >= scanner.SCANNED_BYTES and (chunk := file.read(_CHUNK_BYTES)):
            digest.update(chunk)
            size += len(chunk)
    return Digest(digest.hexdigest(), size, found)
