"""What the ranks print, on its way to the container's log, without the values of the job's secrets.

Only a host whose job has secrets puts this in between. Ranks write to a pipe then, as they do to the container's log on
SageMaker; standard error goes the same way.
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
"""After which what may be the beginning of a value is let through: a prompt, most likely."""

_LAST_SECONDS = 3.0
"""How long the end waits for processes that the ranks have left behind and that still may print."""


class RedactedOutput:
    """A pipe whose other end is the host's standard output.

    Attributes:
        descriptor: What children write to; `close_write_end` after they have it.
    """

    def __init__(self, values: Iterable[str], target: int = 1) -> None:
        self._source, self.descriptor = os.pipe()
        self._target = target
        self._stream = RedactingStream(values)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="output", daemon=True)
        self._thread.start()

    def close_write_end(self) -> None:
        """Close this process' end, so that the last child's end is the end of the output."""
        os.close(self.descriptor)

    def end(self) -> None:
        """Wait until all has been written."""
        self._ended.set()
        self._thread.join(_LAST_SECONDS)

    def _pump(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads the log any more
            while True:
                ready, _, _ = select.select([self._source], [], [], _IDLE_SECONDS)
                piece = os.read(self._source, _PIECE_BYTES) if ready else None
                if piece == b"":
                    break
                self._write(self._stream.flush() if piece is None else self._stream.feed(piece))
                if piece is None and self._ended.is_set():
                    break
            self._write(self._stream.flush())
        # Children that still write must get an error rather than wait for ever.
        os.close(self._source)

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._target, content) :]
