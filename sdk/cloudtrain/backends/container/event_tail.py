"""Collection of the events of all hosts in `events.jsonl` during a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.event_summary import EventSummary, write_summary
from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.strict_json import dump_json

_SUMMARY_EVERY_BYTES = 1 << 20
"""Size of events after which a new summary is written."""


class EventTail:
    """Appends the events of the hosts' logs to a file while the logs grow.

    If the disk is full, events are kept in memory and written by a later `read`. A long file gets a summary beside it.

    Args:
        logs: Log file by host.
        target: The event file, with one JSON object per line.

    Attributes:
        seen: The events so far without step events, of which there may be millions.
    """

    def __init__(self, logs: Mapping[str, Path], target: Path) -> None:
        self.seen: list[dict[str, Any]] = []
        self._tails = [LineTail(path) for path in logs.values()]
        self._pending = b""
        self._target = target
        self._progress = Progress()
        self._summarised_bytes = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        self._out = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._covers_all = os.fstat(self._out).st_size == 0

    def read(self) -> None:
        """Read the new lines. An incomplete line is left for the next call."""
        new: list[dict[str, Any]] = []
        for tail in self._tails:
            new += (event for line in tail.read() if (event := parse_event(line.decode("utf-8", "replace"))))
        self.seen += (event for event in new if event["event"] != "step")
        self._progress = fold_events(new, self._progress)
        self._pending += b"".join(dump_json(event).encode() + b"\n" for event in new)
        with contextlib.suppress(OSError):
            while self._pending:
                self._pending = self._pending[os.write(self._out, self._pending) :]
            self._summarise()

    def _summarise(self) -> None:
        written = os.fstat(self._out).st_size
        if self._covers_all and written - self._summarised_bytes >= _SUMMARY_EVERY_BYTES:
            write_summary(self._target, EventSummary(written, self._progress))
            self._summarised_bytes = written

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()
        os.close(self._out)
