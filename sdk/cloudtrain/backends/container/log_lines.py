"""Lines of a log that grows, read in memory that does not depend on their length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

LINE_BYTES: Final = 1 << 20
"""What is kept of a line. CloudWatch cuts at 256 KB; events and tracebacks are far shorter."""

_READ_BYTES: Final = 1 << 18


class LineTail:
    """Reads what has been written to a file since the last read, line by line.

    Args:
        path: The file, which need not exist yet.
        start: Offset in bytes at which a line begins.
        splits: Whether a line of more than 1 MiB becomes several; by default its end is replaced by a note.

    Attributes:
        place: Offset in bytes behind the last line that was returned.
    """

    def __init__(self, path: Path, *, start: int = 0, splits: bool = False) -> None:
        self.place = start
        self._path = path
        self._splits = splits
        self._file: IO[bytes] | None = None
        self._line = bytearray()
        self._left_out = 0

    def read(self, *, final: bool = False) -> Iterator[bytes]:
        """Yield the new lines without their newline.

        Args:
            final: Whether nothing will be written any more: what has no newline yet is a line, too.

        Raises:
            OSError: the file cannot be read.
        """
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
            self._file.seek(self.place)
        while piece := self._file.read(_READ_BYTES):
            *ends, rest = piece.split(b"\n")
            for end in ends:
                yield from self._add(end)
                self.place += 1
                yield self._take()
            yield from self._add(rest)
        if final and self._line:
            yield self._take()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, piece: bytes) -> Iterator[bytes]:
        room = LINE_BYTES - len(self._line)
        self._line += piece[:room]
        if len(piece) > room and self._splits:
            yield self._take()
            self._line += piece[room:]
        else:
            self._left_out += max(0, len(piece) - room)

    def _take(self) -> bytes:
        line, self._line = bytes(self._line), bytearray()
        self.place += len(line) + self._left_out
        if self._left_out:
            line += b" [cloudtrain: the line is cut here, %d bytes are left out]" % self._left_out
            self._left_out = 0
        return line
