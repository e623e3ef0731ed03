"""Collection of the events of all hosts in `events.jsonl` during a run.

A long file gets a summary beside it, so that a status need not read millions of events.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract import check_event, parse_event
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SUMMARY_FILE: Final = "events-summary.json"
_VERSION: Final = 3
_SUMMARY_EVERY_BYTES = 1 << 20
"""Size of events after which a new summary is written."""

_KEPT_KINDS: Final = frozenset({"failed", "left"})
_MOST_KEPT: Final = 1000
"""Events that stay in memory: of the kinds that decide how a run has ended, and never more than this number."""


@dataclass(frozen=True)
class EventSummary:
    """The progress after the events in the first `size_bytes` of an event file. `version` is that of the format."""

    size_bytes: int
    progress: Progress
    version: int = _VERSION


def read_summary(events: Path) -> EventSummary:
    """Return the summary beside the event file; an empty one if it cannot be read, so that all events are read."""
    try:
        content = read_regular(events.with_name(SUMMARY_FILE))
    except OSError:
        return EventSummary(0, Progress())
    from pydantic import ValidationError

    try:
        summary = _adapter().validate_json(content)
    except ValidationError:
        return EventSummary(0, Progress())
    if summary.version != _VERSION:
        return EventSummary(0, Progress())
    return summary


@functools.cache
def _adapter() -> TypeAdapter[EventSummary]:
    # Only a run with very many events has a summary, and the import takes long.
    from pydantic import TypeAdapter

    return TypeAdapter(EventSummary)


def read_events(tail: LineTail) -> Iterator[dict[str, Any]]:
    """Yield the new events of an event file, without other lines and an incomplete last line."""
    for line in tail.read():
        with contextlib.suppress(ValueError):
            if (event := check_event(load_json(line))) is not None:
                yield event


def read_progress(events: Path) -> Progress:
    """Return the progress after all events of a file; none where there is no file.

    Raises:
        OSError: The file cannot be read.
    """
    summary = read_summary(events)
    tail = LineTail(events, start=summary.size_bytes)
    try:
        return fold_events(read_events(tail), summary.progress)
    except FileNotFoundError:
        return Progress()
    finally:
        tail.close()


class EventTail:
    """Appends the events of the hosts' logs to a file while the logs grow.

    If the disk is full, events are kept in memory and written by a later `read`.

    Args:
        logs: Log file by host.
        target: The event file, with one JSON object per line.

    Attributes:
        seen: The events so far that decide how the run has ended. Of all others there may be millions.
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
            new += (
                event
                for line in tail.read()
                if (event := parse_event(line.decode("utf-8", "replace")))
            )
        deciding = [event for event in new if event["event"] in _KEPT_KINDS]
        self.seen += deciding[: _MOST_KEPT - len(self.seen)]
        self._fold(new)
        self._pending += b"".join(dump_json(event).encode() + b"\n" for event in new)
        with contextlib.suppress(OSError):
            while self._pending:
                self._pending = self._pending[os.write(self._out, self._pending) :]
            written = os.fstat(self._out).st_size
            if self._covers_all and written - self._summarised_bytes >= _SUMMARY_EVERY_BYTES:
                summary = _adapter().dump_json(EventSummary(written, self._progress)).decode()
                write_atomically(self._target.with_name(SUMMARY_FILE), summary)
                self._summarised_bytes = written

    def _fold(self, new: Iterable[Mapping[str, Any]]) -> None:
        try:
            self._progress = fold_events(new, self._progress)
        except Exception:  # noqa: BLE001 (a line that a program prints must not end its training)
            # Readers of the file fold all events themselves.
            self._covers_all = False

    @property
    def progress(self) -> Progress:
        """The progress after the events so far."""
        return self._progress

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()
        os.close(self._out)
