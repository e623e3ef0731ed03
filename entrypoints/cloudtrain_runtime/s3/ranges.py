"""Ranged reads of one object with read-ahead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from cloudtrain_runtime.process.thread_pool import DaemonThreadPool

_THREADS = 4


class RangeReader:
    """Reads an object from one thread, mostly in order. It prefetches at most `_THREADS` ranges.

    Args:
        fetch: Returns the bytes from an offset to an end.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], bytes_: int) -> None:
        self._fetch = fetch
        self._bytes = bytes_
        self._next_offset = 0
        self._ahead: dict[tuple[int, int], Future[bytes]] = {}
        self._threads = DaemonThreadPool(_THREADS, "download")

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes from `offset` on: `length` of them, fewer only at the object's end.

        Raises:
            S3Error: the range cannot be read.
        """
        end = min(offset + length, self._bytes)
        if offset >= end:
            return b""
        prefetched = self._ahead.pop((offset, end), None)
        if offset != self._next_offset:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
        elif end < self._bytes:
            prefetched = prefetched or self._threads.submit(self._fetch, offset, end)
            self._prefetch(end, length)
        self._next_offset = end
        return prefetched.result() if prefetched else self._fetch(offset, end)

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.close()

    def _prefetch(self, offset: int, length: int) -> None:
        wanted = [
            (start, min(start + length, self._bytes))
            for start in range(offset, min(offset + _THREADS * length, self._bytes), length)
        ]
        for span in [span for span in self._ahead if span not in wanted]:
            self._ahead.pop(span).cancel()
        for span in wanted:
            if span not in self._ahead:
                self._ahead[span] = self._threads.submit(self._fetch, *span)
