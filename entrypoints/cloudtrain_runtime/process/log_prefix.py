"""The rank before each line that it prints: ranks share their host's log."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from cloudtrain_runtime.contract import EVENT_PREFIX
from cloudtrain_runtime.process.environment import is_mpirun_rank

_TOLD = (b"[rank", EVENT_PREFIX.encode())
"""How lines begin that tell their rank already: those of torch's hook for exceptions, and events."""


def prefix_lines(environ: Mapping[str, str]) -> None:
    """Begin each line that Python code prints from now on with `[rank3]: `, as torch does with a rank's traceback.

    A line leaves in one piece when it ends or is flushed, so those of several ranks do not mix. One rank alone needs no
    mark, and mpirun sets its own. What C code and child processes print has none.
    """
    if int(environ.get("WORLD_SIZE", "1")) < 2 or is_mpirun_rank(environ):  # noqa: PLR2004 (two can mix)
        return
    mark = f"[rank{environ['RANK']}]: ".encode()
    sys.stdout = _marked(sys.stdout, mark)
    sys.stderr = _marked(sys.stderr, mark)


def _marked(stream: TextIO, mark: bytes) -> TextIO:
    stream.flush()
    raw = _Marked(stream.fileno(), mark)
    # Without a buffer of bytes in between: what is written to `sys.stdout.buffer` leaves at once, as it did.
    buffer: Any = raw
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


class _Marked(io.RawIOBase):
    """Writes to a file descriptor, each line behind a mark."""

    def __init__(self, descriptor: int, mark: bytes) -> None:
        self._descriptor = descriptor
        self._mark = mark
        self._is_at_start = True

    def writable(self) -> bool:
        """Tell that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, for child processes and for what writes around this."""
        return self._descriptor

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write all of it."""
        content = bytes(data)
        marked = b"".join(self._mark_piece(piece) for piece in _lines(content))
        while marked:
            marked = marked[os.write(self._descriptor, marked) :]
        return len(content)

    def _mark_piece(self, piece: bytes) -> bytes:
        begins, self._is_at_start = self._is_at_start, piece.endswith(b"\n")
        return self._mark + piece if begins and piece != b"\n" and not piece.startswith(_TOLD) else piece


def _lines(content: bytes) -> list[bytes]:
    """Split after each newline, and nowhere else: a progress bar's carriage returns are within a line."""
    *whole, rest = content.split(b"\n")
    return [*(line + b"\n" for line in whole), *([rest] if rest else [])]
