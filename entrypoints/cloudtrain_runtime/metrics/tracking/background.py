"""What all trackers have: a queue, a thread that empties it, retries, and a limit at the end of the run.

Values are kept while a service does not answer, up to a limit; the event `tracking` reports the first failure, and at
the end how many values were dropped.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from cloudtrain_runtime.contract.metric_values import metric_values
from cloudtrain_runtime.metrics.tracking.tracker import (
    Connection,
    Ending,
    Tracker,
    Value,
    describe_error,
)
from cloudtrain_runtime.process.event_log import emit

_INTERVAL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_MOST_VALUES = 200_000
"""Values that are kept while a service does not answer: about 20 MB. The oldest are dropped first."""

_BATCH = 1000
_LAST_ATTEMPTS = 3
"""How often the last values are tried: one lost request does not lose them, and a service that is away holds no run."""


class BackgroundLogger:
    """Logs a run to one service, from the run's events. No method waits for the service but `join`.

    Each step of a metric is logged once: steps that a restart or another attempt repeats keep their first values.

    Args:
        tracker: The service.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._values: deque[Value] = deque()
        # Those of a request that has not succeeded yet.
        self._sending: list[Value] = []
        self._newest: dict[str, int] = {}
        self._started: Mapping[str, Any] | None = None
        self._connection: Connection | None = None
        self._checkpoint = self._saved_checkpoint = ""
        self._ending = Ending.FAILED
        self._dropped = 0
        self._has_warned = False
        self._has_failed = False
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name=tracker.place, daemon=True)
        self._thread.start()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take the values of a valid event."""
        kind = event["event"]
        if kind in ("started", "attempt"):
            self._started = event
        elif kind == "checkpoint":
            self._checkpoint = event["uri"]
            # A host that is lost now continues from here: the values before must not be lost.
            self._wake.set()
        elif kind in (Ending.FINISHED.value, Ending.STOPPED.value):
            self._ending = Ending(kind)
        for name, value in metric_values(event):
            if len(self._values) >= _MOST_VALUES:
                self._values.popleft()
                self._dropped += 1
            number = math.nan if value is None else float(value)
            self._values.append(Value(name, number, event["time"], event.get("step", 0)))

    def close(self, ending: Ending | None = None) -> None:
        """Ask for the remaining values to be logged. `join` waits for it.

        Args:
            ending: How the run has ended, if its events do not say it.
        """
        if ending is not None and Ending.FAILED in (ending, self._ending):
            self._ending = ending
        self._is_closing = True
        self._wake.set()

    def join(self, deadline: float) -> None:
        """Wait until the remaining values are logged, at most until a time of `time.monotonic`; report what is not."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        dropped = self._dropped + len(self._sending) + len(self._values)
        place = self._tracker.place
        if dropped:
            emit(
                "tracking",
                tracker=self._tracker.name,
                dropped=dropped,
                detail=f"{dropped} values were not logged to {place}",
            )
        elif self._connection is not None and (self._thread.is_alive() or self._has_failed):
            self._emit(detail=f"{place} has not confirmed the last values")

    def _work(self) -> None:
        pause, last_attempts = _INTERVAL_SECONDS, 0
        while last_attempts < _LAST_ATTEMPTS:
            self._wake.wait(pause)
            self._wake.clear()
            if self._is_closing:
                last_attempts += 1
                pause = _INTERVAL_SECONDS
            try:
                self._log(is_last=last_attempts > 0)
                self._has_failed = False
                if last_attempts:
                    return
                pause = _INTERVAL_SECONDS
            except Exception as error:  # noqa: BLE001 (of a client, the network or a server: training continues)
                self._has_failed = True
                self._warn(
                    f"{self._tracker.place} takes no values, they are kept: {describe_error(error)}"
                )
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _emit(self, **fields: str) -> None:
        emit("tracking", tracker=self._tracker.name, **fields)

    def _warn(self, detail: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._emit(detail=detail)

    def _log(self, *, is_last: bool) -> None:
        """Log the values so far, at first with everything that describes the run."""
        if self._started is None:
            return
        if self._connection is None:
            found = self._tracker.connect(self._started)
            self._newest = dict(found.logged)
            self._connection = found
            if found.fields:
                self._emit(**found.fields)
        checkpoint = self._checkpoint
        while self._take_batch():
            self._dropped += self._tracker.log(self._sending)
            self._sending = []
        if checkpoint != self._saved_checkpoint:
            self._tracker.save(checkpoint)
            self._saved_checkpoint = checkpoint
        if is_last:
            self._tracker.end(self._ending)

    def _take_batch(self) -> bool:
        """Take the next values, without those of steps that are logged; return whether there are any."""
        while self._values and len(self._sending) < _BATCH:
            value = self._values.popleft()
            if value.step > self._newest.get(value.name, -1):
                self._newest[value.name] = value.step
                self._sending.append(value)
        return bool(self._sending)
