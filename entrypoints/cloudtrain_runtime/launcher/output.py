"""The ranks' output with the values of the job's secrets redacted.

Used only when the job has secrets. The ranks then write standard output and standard error to a pipe, and a thread of
the launcher copies it to the container's log.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterable

from cloudtrain_runtime.contract.redaction import RedactingStream

_PIECE_BYTES = 1 << 16
_IDLE_SECONDS = 1.0
"""Time without output after which a possible beginning of a value is printed; it is most likely a prompt."""

_LAST_SECONDS = 3.0
"""How long `end` waits for output of processes that outlive the ranks."""


class RedactedOutput:
    """A pipe whose other end is the host's standard output.

    Attributes:
        descriptor: The end that children write to. Call `close_write_end` after they have inherited it.
    """

    def __init__(self, values: Iterable[str], target: int = 1) -> None:
        self._source, self.descriptor = os.pipe()
        self._target = target
        self._stream = RedactingStream(values)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="output", daemon=True)
        self._thread.start()

    def close_write_end(self) -> None:
        """Close this process's copy of the write end, so that the output ends with the last child."""
        os.close(self.descriptor)

    def end(self) -> None:
        """Wait until all output has been written."""
        self._ended.set()
        self._thread.join(_LAST_SECONDS)

    def _pump(self) -> None:
        with contextlib.suppress(OSError):  # the log has been closed
            while True:
                ready, _, _ = select.select([self._source], [], [], _IDLE_SECONDS)
                piece = os.read(self._source, _PIECE_BYTES) if ready else None
                if piece == b"":
                    break
                self._write(self._stream.flush() if piece is None else self._stream.feed(piece))
                if piece is None and self._ended.is_set():
                    break
            self._write(self._stream.flush())
        # Children that still write must receive an error rather than block forever.
        os.close(self._source)

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._target, content) :]
