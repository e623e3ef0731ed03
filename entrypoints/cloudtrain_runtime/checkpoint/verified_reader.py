"""Verified reads of checkpoints: every block is compared with the manifest before it is returned. Without torch."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.contract.manifest import BLOCK_BYTES, StoredFile
from cloudtrain_runtime.errors import DamagedError
from cloudtrain_runtime.s3.objects import ObjectReader

_HELD_BLOCKS = 4
"""Cached blocks. A saved tensor is read from its end (its directory), then from its start: both stay cached."""


class _VerifiedFile(io.RawIOBase):
    """A file of a checkpoint. Each block is compared with the manifest before any of it is returned."""

    def __init__(
        self, source: ObjectReader, stored: StoredFile, block_bytes: int, name: str
    ) -> None:
        super().__init__()
        self._source = source
        self._stored = stored
        self._block_bytes = block_bytes
        self._name = name
        # The least recently used block is the first.
        self._held: dict[int, memoryview] = {}
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.bytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), max(0, self._stored.bytes - self._at))
        done = 0
        while done < wanted:
            index, within = divmod(self._at, self._block_bytes)
            piece = self._block(index)[within : within + wanted - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def _block(self, index: int) -> memoryview:
        if index in self._held:
            self._held[index] = self._held.pop(index)
            return self._held[index]
        first = index * self._block_bytes
        length = min(self._block_bytes, self._stored.bytes - first)
        data = memoryview(self._source.read_at(first, length))
        if len(data) != length:
            raise DamagedError(
                f"{self._name} ends after {first + len(data)} bytes instead of {self._stored.bytes}"
            )
        if zlib.crc32(data) != self._stored.crc32[index]:
            raise DamagedError(
                f"{self._name} has changed since it was written (bytes {first} to {first + length})"
            )
        self._held[index] = data
        if len(self._held) > _HELD_BLOCKS:
            del self._held[next(iter(self._held))]
        return data


@contextmanager
def open_verified(
    storage: Storage, folder: str, name: str, stored: StoredFile, block_bytes: int = BLOCK_BYTES
) -> Iterator[io.RawIOBase]:
    """Open a file of a checkpoint.

    Raises:
        DamagedError: it does not exist, or, on reading, a block differs from the data that was written.
    """
    try:
        with storage.open(folder, name, stored.bytes) as source:
            yield _VerifiedFile(source, stored, block_bytes, name)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None


def find_damage(
    storage: Storage,
    folder: str,
    files: Mapping[str, StoredFile],
    block_bytes: int = BLOCK_BYTES,
    on_block: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Read files of a checkpoint completely and yield one sentence per damaged file.

    `on_block` is called after each block.
    """
    buffer = memoryview(bytearray(block_bytes))
    for name, stored in sorted(files.items()):
        try:
            with open_verified(storage, folder, name, stored, block_bytes) as file:
                while file.readinto(buffer):
                    on_block()
        except DamagedError as error:
            yield str(error)
