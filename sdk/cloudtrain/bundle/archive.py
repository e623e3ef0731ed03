"""Bundle archives: tar files with sorted names, in gzip format without compression.

Equal contents give equal bytes everywhere. Compressed bytes would differ between versions of zlib and zlib-ng. See
docs/decisions/008-bundles-are-not-compressed.md.
"""

from __future__ import annotations

import hashlib
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cloudtrain.bundle import digests
from cloudtrain.bundle.contents import WORKER_SOURCE, Contents, Entry, ProgressCallback
from cloudtrain.bundle.rejections import printable_name
from cloudtrain.errors import BundleError
from cloudtrain.planning.plan import CodeInfo
from cloudtrain_runtime.contract import BUNDLE_FILE

_COPY_BYTES = 2**20
_GZIP_FORMAT = 16 + zlib.MAX_WBITS
"""zlib checks checksum and size of the gzip format, too."""


@dataclass(frozen=True)
class Bundle:
    """A written archive."""

    path: Path
    info: CodeInfo


def write_bundle(
    contents: Contents, folder: Path, *, progress: ProgressCallback | None = None
) -> Bundle:
    """Write the archive to `<folder>/<digest>/sourcedir.tar.gz`, unless it exists intact.

    Equal contents give equal bytes: sorted names, zero times and owners, modes 644 or 755, no compression.

    Args:
        contents: The bundle's contents.
        folder: Folder of all bundles.
        progress: Called after each file that has been written.

    Raises:
        BundleError: A file has changed since it was listed, or the folder is not writable.
    """
    target = folder / contents.info.digest / BUNDLE_FILE
    if _is_intact(target, contents):
        return Bundle(target, contents.info)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed below)
            dir=target.parent, prefix=".writing-", delete=False
        )
    except OSError as error:
        raise BundleError(
            f"cannot write to {target.parent}: {error.strerror}", "set CLOUDTRAIN_HOME"
        ) from error
    try:
        with partial:
            _write(contents, partial, progress)
        Path(partial.name).replace(target)
    except _ChangedError as error:
        digests.forget(folder)
        message = f"{printable_name(str(error))} changed while the bundle was written"
        raise BundleError(message, "submit again when no program writes to it") from error
    except OSError as error:
        raise BundleError(
            f"cannot write {target}: {error.strerror}", "free disk space, or set CLOUDTRAIN_HOME"
        ) from error
    finally:
        Path(partial.name).unlink(missing_ok=True)
    return Bundle(target, contents.info)


def _is_intact(archive: Path, contents: Contents) -> bool:
    """Return whether an archive exists and has exactly these contents.

    A crash may have truncated it, a disk or another program changed it. Its container would execute what is there.
    """
    content = zlib.decompressobj(_GZIP_FORMAT)
    try:
        with archive.open("rb") as file:
            while chunk := file.read(_COPY_BYTES):
                content.decompress(chunk)
        if not content.eof or content.unused_data:
            return False
        with tarfile.open(archive, "r:gz") as members:
            found = [_digest_of(members, member) for member in members]
    except (OSError, EOFError, tarfile.TarError, zlib.error):
        return False
    return found == [(entry.name, entry.executable, entry.sha256) for entry in contents.entries]


def _digest_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[str, bool, str]:
    """Return name, executable bit and digest of a member; no digest for what is no regular file."""
    content = archive.extractfile(member) if member.isreg() else None
    if content is None:
        return member.name, False, ""
    digest = hashlib.sha256()
    while chunk := content.read(_COPY_BYTES):
        digest.update(chunk)
    return member.name, bool(member.mode & 0o100), digest.hexdigest()


class _ChangedError(Exception):
    """A file has changed since it was listed."""


def _write(contents: Contents, out: IO[bytes], progress: ProgressCallback | None) -> None:
    stored = _StoredGzip(out)
    done = 0
    for entry in contents.entries:
        _add(stored, entry)
        done += entry.size
        if progress is not None:
            progress(done, contents.info.bytes)
    # A tar archive ends with two empty blocks and is padded to complete records.
    stored.write(bytes(2 * tarfile.BLOCKSIZE))
    stored.write(bytes(-stored.size % tarfile.RECORDSIZE))
    stored.close()


def _add(archive: _StoredGzip, entry: Entry) -> None:
    """Write one member. Hash its content again to detect a change since it was listed."""
    header = tarfile.TarInfo(entry.name)
    header.mode = 0o755 if entry.executable else 0o644
    header.size = entry.size
    archive.write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))
    digest = hashlib.sha256()
    size = 0
    for chunk in _chunks(entry):
        digest.update(chunk)
        size += len(chunk)
        if size > entry.size:
            break
        archive.write(chunk)
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise _ChangedError(entry.name)
    archive.write(bytes(-size % tarfile.BLOCKSIZE))


def _chunks(entry: Entry) -> Iterator[bytes]:
    if entry.source is None:
        yield WORKER_SOURCE.encode()
        return
    try:
        with open(entry.source, "rb", buffering=0) as file:  # noqa: PTH123 (see read_digest)
            while chunk := file.read(_COPY_BYTES):
                yield chunk
    except OSError as error:
        raise _ChangedError(entry.name) from error


class _StoredGzip:
    """Writes gzip (RFC 1952) whose deflate blocks are all stored (RFC 1951, 3.2.4)."""

    _TRAILER = struct.Struct("<II")
    # Magic, deflate, no flags, no time, no extra flags, system unknown.
    _HEADER = b"\x1f\x8b\x08\0" + bytes(4) + b"\0\xff"
    _BLOCK = struct.Struct("<BHH")
    _BLOCK_BYTES = 0xFFFF

    def __init__(self, out: IO[bytes]) -> None:
        self.size = 0
        self._out = out
        self._pending = bytearray()
        self._crc = 0
        out.write(self._HEADER)

    def write(self, data: bytes) -> None:
        """Add content."""
        self._crc = zlib.crc32(data, self._crc)
        self.size += len(data)
        self._pending += data
        with memoryview(self._pending) as pending:
            ready = len(pending) - len(pending) % self._BLOCK_BYTES
            for start in range(0, ready, self._BLOCK_BYTES):
                self._block(pending[start : start + self._BLOCK_BYTES], is_last=False)
        del self._pending[:ready]

    def close(self) -> None:
        """Write the last block and the trailer."""
        self._block(self._pending, is_last=True)
        self._out.write(self._TRAILER.pack(self._crc, self.size & 0xFFFFFFFF))

    def _block(self, data: bytearray | memoryview, *, is_last: bool) -> None:
        self._out.write(self._BLOCK.pack(int(is_last), len(data), len(data) ^ 0xFFFF))
        self._out.write(data)
