"""The ranks' output on its way to the log: secrets are redacted, and values of metrics are read from it.

Used only when the job has secrets or patterns of metrics. The ranks then write standard output and standard error to a
pipe, and a thread of the launcher copies it to the container's log.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Iterable, Mapping

from cloudtrain_runtime.contract import EVENT_PREFIX
from cloudtrain_runtime.contract.redaction import RedactingStream
from cloudtrain_runtime.process.event_log import emit
from cloudtrain_runtime.process.progress_report import MetricBuffer

_PIECE_BYTES = 1 << 16
_IDLE_SECONDS = 1.0
"""Time without output after which a possible beginning of a value is printed; it is most likely a prompt."""

_LAST_SECONDS = 15.0
"""How long `end` waits at most: for a slow log, or for a process that outlives the ranks and prints without a pause."""

_RANK = re.compile(r"\[rank(\d+)\]: ?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_BAR_SECONDS = 2.0
"""Longest time that values wait for the end of a line."""

_MAX_LINE_BYTES = 1 << 14
"""Longest part of a line, from its end, in which metrics are searched: longer lines are no reports of metrics."""


class RankOutput:
    """A pipe whose other end is the host's standard output.

    Attributes:
        descriptor: The end that children write to. Call `close_write_end` after they have inherited it.

    Args:
        values: Secrets to redact, as for `RedactingStream`.
        metrics: Reads metrics from the output, if any.
        target: Descriptor that the output is copied to.
    """

    def __init__(
        self, values: Iterable[str], metrics: MetricReader | None = None, target: int = 1
    ) -> None:
        self._source, self.descriptor = os.pipe()
        self._target = target
        self._stream = RedactingStream(values)
        self._metrics = metrics
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
            if self._metrics is not None:
                self._metrics.end()
        # Children that still write must receive an error rather than block forever.
        os.close(self._source)

    def _write(self, content: bytes) -> None:
        left = content
        while left:
            left = left[os.write(self._target, left) :]
        if self._metrics is not None:
            self._metrics.feed(content)


class MetricReader:
    """Reads values of metrics from rank 0's output by regular expressions, and prints them as events between its lines.

    Args:
        patterns: Regular expression with one group, by metric. `step` and `total` are the progress; without `step` the
            lines with a value are counted.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._unmatched = dict.fromkeys(patterns)
        self._counts_lines = "step" not in patterns
        self._buffer = MetricBuffer()
        self._step = 0
        self._rest = b""
        self._printed_at = 0.0

    def feed(self, piece: bytes) -> None:
        """Read a piece of the output that has been printed."""
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + piece)
        self._rest = self._rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._read(line[-_MAX_LINE_BYTES:].decode("utf-8", "replace"))
        now = time.monotonic()
        # Between two lines where possible. A progress bar may never end its line; readers find an event within a line.
        wait_seconds = _BAR_SECONDS if self._rest else self._buffer.interval_seconds
        if now - self._printed_at >= wait_seconds:
            self._printed_at = now
            self._buffer.flush()

    def end(self) -> None:
        """Print the last values, and which metrics never had a value."""
        self._read(self._rest.decode("utf-8", "replace"))
        self._buffer.flush()
        if self._unmatched:
            emit("patterns", unmatched=list(self._unmatched))

    def _read(self, line: str) -> None:
        prefix = _RANK.match(line)  # where several ranks share the log
        if EVENT_PREFIX in line or (prefix is not None and prefix.group(1) != "0"):
            return
        line = line if prefix is None else line[prefix.end() :]
        found: dict[str, float] = {}
        for name, pattern in self._patterns.items():
            match = pattern.search(line)
            with contextlib.suppress(
                ValueError, TypeError
            ):  # a group that is empty, or no number: not a value
                if match is not None:
                    text = match.group(1)
                    found[name] = float(
                        text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
                    )
        for name in found:
            self._unmatched.pop(name, None)
        if not found:
            return
        if self._counts_lines:
            self._step += 1
        step, total = found.pop("step", None), found.pop("total", None)
        with contextlib.suppress(ValueError, OverflowError):  # not finite
            self._step = self._step if step is None else max(0, int(step))
            self._buffer.record(self._step, None if total is None else max(0, int(total)), found)
