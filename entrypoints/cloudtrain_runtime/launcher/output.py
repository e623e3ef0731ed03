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

from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event
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
        # The loop ends when the log has been closed.
        with contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([self._source], [], [], _IDLE_SECONDS)
                piece = os.read(self._source, _PIECE_BYTES) if ready else None
                if piece == b"":
                    break
                if piece is not None:
                    self._write(self._stream.feed(piece))
                    continue
                self._write(self._stream.flush())
                if self._ended.is_set():
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
            lines with a value are counted. With `epoch`, steps that begin anew in each epoch are numbered through all
            epochs.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._unmatched = dict.fromkeys(patterns)
        self._counts_lines = "step" not in patterns
        self._epochs = EpochSteps() if "epoch" in patterns else None
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
        # Between two lines where possible. A progress bar may never end its line; readers find an
        # event within a line.
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

    def flush(self) -> None:
        """Print the values so far."""
        self._buffer.flush()

    def _read(self, line: str) -> None:
        # Lines have a rank's prefix where several ranks share the log.
        prefix = _RANK.match(line)
        if EVENT_PREFIX in line:
            self._read_event(line)
            return
        if prefix is not None and prefix.group(1) != "0":
            return
        found = self._find(line if prefix is None else line[prefix.end() :])
        if not found:
            return
        if self._counts_lines:
            self._step += 1
        # Values that are not finite are left out.
        with contextlib.suppress(ValueError, OverflowError):
            self._record(found)

    def _find(self, line: str) -> dict[str, float]:
        """Return the values in a line, by metric."""
        found: dict[str, float] = {}
        for name, pattern in self._patterns.items():
            match = pattern.search(line)
            if match is None:
                continue
            # A group that is empty or no number is not a value.
            with contextlib.suppress(ValueError, TypeError):
                text = match.group(1)
                if _THOUSANDS.fullmatch(text):
                    text = text.replace(",", "")
                found[name] = float(text)
        for name in found:
            self._unmatched.pop(name, None)
        return found

    def _record(self, found: dict[str, float]) -> None:
        step = found.pop("step", None)
        total = found.pop("total", None)
        count = None if total is None else max(0, int(total))
        if self._epochs is not None and "epoch" in found:
            self._epochs.enter(int(found["epoch"]))
        if step is not None:
            self._step = max(0, int(step))
            if self._epochs is not None:
                self._step = self._epochs.number(self._step, count)
        # While the steps may be those of an epoch, their total is not the run's.
        is_total = self._epochs is None or self._epochs.counts_through
        self._buffer.record(self._step, count if is_total else None, found)

    def _read_event(self, line: str) -> None:
        event = parse_event(line)
        if event is None or event["event"] != "attempt":
            return
        # The values of the ranks that have ended are complete.
        self.flush()
        if self._epochs is not None:
            self._epochs.restart()


class EpochSteps:
    """Numbers the steps of a counter that begins anew in each epoch, through all epochs.

    A counter that goes on rising from one epoch to the next keeps its own numbers.

    Attributes:
        counts_through: Whether the counter has continued from one epoch to the next.
    """

    def __init__(self) -> None:
        self.counts_through = False
        # Number of the first epoch, 0 or 1 in most programs.
        self._first: int | None = None
        # Number of steps before each epoch.
        self._begins: dict[int, int] = {}
        self._offset = self._newest = 0
        self._is_anew = False
        self._epoch: int | None = None
        self._is_entered = False
        self._printed: int | None = None

    def enter(self, epoch: int) -> None:
        """Begin an epoch, unless it is the present one."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._is_entered = True
        if self._first is None:
            # An epoch that is printed after its steps is followed by those of the next one.
            is_later = self._printed is not None
            self._first = epoch - 1 if is_later else min(epoch, 1)

    def restart(self) -> None:
        """Begin a new attempt, which can continue in any epoch."""
        self._epoch = self._printed = None

    def number(self, step: int, total: int | None) -> int:
        """Return the number of a step that the program counts in its epoch, which has this total of steps."""
        if self._is_entered and self._epoch is not None:
            self._is_entered = False
            self._offset = self._begins.setdefault(self._epoch, self._begin(step, total))
        self._printed = step
        self._newest = self._offset + step
        return self._newest

    def _begin(self, step: int, total: int | None) -> int:
        """Return the number of steps before the present epoch, by its first step."""
        if self._printed is not None and step > self._printed:
            self.counts_through = not self._is_anew
            return self._offset if self._is_anew else 0
        self._is_anew = self._printed is not None
        self.counts_through = False
        if total is not None and self._epoch is not None and self._first is not None:
            return max(0, self._epoch - self._first) * total
        # Without a total the steps continue after the last one that was printed; the first one may
        # be 0.
        return 0 if self._printed is None else self._newest + (step == 0)
