"""Rank prefixes: `[rank3]: ` before each line that a rank prints, because ranks share their host's log."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from cloudtrain_runtime.contract import EVENT_PREFIX
from cloudtrain_runtime.process.environment import is_mpirun_rank

_PREFIXED = (b"[rank", EVENT_PREFIX.encode())
"""Beginnings of lines that name their rank already: those of torch's exception hook, and events."""

_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+")
_BAR_SECONDS = 10.0
"""Time between two lines of a progress bar."""

_BAR_BYTES = 1 << 10
"""Longest state of a progress bar that is kept."""


def prefix_lines(environ: Mapping[str, str]) -> None:
    """Prefix each line that Python code prints from now on with `[rank3]: `, as torch does with a rank's traceback.

    A line is written in one call when it ends or is flushed, so lines of several ranks do not mix. A single rank needs
    no prefix, and mpirun adds its own. Output of C code and child processes has no prefix.

    Each state of a progress bar is written with its prefix, and with its carriage return behind it. Every ten seconds
    and at the end a newline takes the place of the carriage return, so that each rank's bar has lines of its own.
    """
    if int(environ.get("WORLD_SIZE", "1")) < 2 or is_mpirun_rank(environ):  # noqa: PLR2004 (two can mix)
        return
    prefix = f"[rank{environ['RANK']}]: ".encode()
    sys.stdout = _with_prefix(sys.stdout, prefix)
    sys.stderr = _with_prefix(sys.stderr, prefix)


def _with_prefix(stream: TextIO, prefix: bytes) -> TextIO:
    stream.flush()
    raw = _PrefixedStream(stream.fileno(), prefix)
    # No byte buffer in between: data written to `sys.stdout.buffer` is printed at once, as before.
    buffer: Any = raw
    return io.TextIOWrapper(
        buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )


class _PrefixedStream(io.RawIOBase):
    """Raw stream that writes to a file descriptor with a prefix before each line."""

    def __init__(self, descriptor: int, prefix: bytes) -> None:
        self._descriptor = descriptor
        self._prefix = prefix
        self._is_at_start = True
        self._is_bar = False
        self._bar = self._unended = b""
        self._line_time = -_BAR_SECONDS

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        content = bytes(data)
        prefixed = b"".join(map(self._prefix_piece, _PIECE.findall(content)))
        while prefixed:
            prefixed = prefixed[os.write(self._descriptor, prefixed) :]
        return len(content)

    def _prefix_piece(self, piece: bytes) -> bytes:
        if self._is_bar and piece.startswith((*_PREFIXED, b"Traceback (")):
            self._is_bar = False
        if self._is_bar or piece.endswith(b"\r"):
            return self._prefix_bar(piece)
        begins = self._is_at_start
        self._is_at_start = piece.endswith(b"\n")
        if not begins or piece == b"\n" or piece.startswith(_PREFIXED):
            return piece
        return self._prefix + piece

    def _prefix_bar(self, piece: bytes) -> bytes:
        """Return the bar's present state as a part of the log that ends, or nothing when it is known already."""
        if not self._is_at_start:
            # The text before the first carriage return has its prefix already.
            self._is_bar = self._is_at_start = True
            return piece
        text = piece.rstrip(b"\r\n")
        is_last = piece.endswith(b"\n")
        state = b""
        if text:
            state = (self._bar + text)[-_BAR_BYTES:]
        elif is_last:
            # The newline ends the last state, which was written with a carriage return.
            state = self._unended
        self._is_bar = not is_last
        self._bar = b"" if piece.endswith((b"\r", b"\n")) else state
        if not state.strip():
            return b""
        now = time.monotonic()
        ends = is_last or now - self._line_time >= _BAR_SECONDS
        if not ends:
            self._unended = state
            return self._prefix + state + b"\r"
        self._line_time = now
        self._unended = b""
        return self._prefix + state + b"\n"
