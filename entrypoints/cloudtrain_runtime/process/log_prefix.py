"""Rank prefixes: `[rank3]: ` before each line that a rank prints, because ranks share their host's log."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from cloudtrain_runtime.contract import EVENT_PREFIX
from cloudtrain_runtime.process.environment import is_mpirun_rank

_PREFIXED = (b"[rank", EVENT_PREFIX.encode())
"""Beginnings of lines that name their rank already: those of torch's exception hook, and events."""


def prefix_lines(environ: Mapping[str, str]) -> None:
    """Prefix each line that Python code prints from now on with `[rank3]: `, as torch does with a rank's traceback.

    A line is written in one call when it ends or is flushed, so lines of several ranks do not mix. A single rank needs
    no prefix, and mpirun adds its own. Output of C code and child processes has no prefix.
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
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


class _PrefixedStream(io.RawIOBase):
    """Raw stream that writes to a file descriptor with a prefix before each line."""

    def __init__(self, descriptor: int, prefix: bytes) -> None:
        self._descriptor = descriptor
        self._prefix = prefix
        self._is_at_start = True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        content = bytes(data)
        prefixed = b"".join(self._prefix_piece(piece) for piece in _lines(content))
        while prefixed:
            prefixed = prefixed[os.write(self._descriptor, prefixed) :]
        return len(content)

    def _prefix_piece(self, piece: bytes) -> bytes:
        begins, self._is_at_start = self._is_at_start, piece.endswith(b"\n")
        return self._prefix + piece if begins and piece != b"\n" and not piece.startswith(_PREFIXED) else piece


def _lines(content: bytes) -> list[bytes]:
    """Split after each newline only: a progress bar's carriage returns are within a line."""
    *complete, rest = content.split(b"\n")
    return [*(line + b"\n" for line in complete), *([rest] if rest else [])]
