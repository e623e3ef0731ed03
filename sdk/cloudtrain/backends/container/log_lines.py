"""Reader of growing logs, with limited memory for lines of any length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from cloudtrain.support.regular_files import open_regular

LINE_BYTES: Final = 1 << 20
"""Longest part of a line that is kept; a note replaces the rest. CloudWatch truncates at 256 KB; events and tracebacks
are far shorter."""

_READ_BYTES: Final = 1 << 18


class LineTail:
    """Reads the new lines of a file.

    Args:
        path: The file, which need not exist yet.
        start: Offset in bytes of the beginning of a line.

    Attributes:
        offset: Offset in bytes after the last returned line.
    """

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self.offset = start
        self._path = path
        self._file: IO[bytes] | None = None
        self._line = bytearray()
        self._omitted_bytes = 0

    def read(self, *, final: bool = False) -> Iterator[bytes]:
        """Yield the new lines without their newline.

        Args:
            final: Whether the file is complete, so that a last part without a newline is a line, too.

        Raises:
            OSError: the file cannot be read.
        """
        if self._file is None:
            try:
                self._file = open_regular(self._path)
            except FileNotFoundError:
                return
            self._file.seek(self.offset)
        while piece := self._file.read(_READ_BYTES):
            *ends, rest = piece.split(b"\n")
            for end in ends:
                self._add(end)
                self.offset += 1
                yield self._end_line()
            self._add(rest)
        if final and self._line:
            yield self._end_line()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, piece: bytes) -> None:
        room = LINE_BYTES - len(self._line)
        self._line += piece[:room]
        self._omitted_bytes += max(0, len(piece) - room)

    def _end_line(self) -> bytes:
        line = bytes(self._line)
        self._line = bytearray()
        self.offset += len(line) + self._omitted_bytes
        if self._omitted_bytes:
            line += b" [cloudtrain: line truncated, %d bytes omitted]" % self._omitted_bytes
            self._omitted_bytes = 0
        return line
