"""Summary of a long event file, beside `events.jsonl`, so that a status need not read millions of events."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from cloudtrain.runs.progress import Progress
from cloudtrain.support.atomic_write import write_atomically

SUMMARY_FILE: Final = "events-summary.json"
_VERSION: Final = 1


@dataclass(frozen=True)
class EventSummary:
    """The progress after the first part of an event file.

    Attributes:
        size_bytes: Size of this part.
        progress: Progress after its events.
        version: Version of the format.
    """

    size_bytes: int
    progress: Progress
    version: int = _VERSION


def write_summary(events: Path, summary: EventSummary) -> None:
    """Write the summary beside the event file.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(events.with_name(SUMMARY_FILE), _adapter().dump_json(summary).decode())


def read_summary(events: Path) -> EventSummary:
    """Return the summary beside the event file; an empty one if it cannot be read, so that all events are read."""
    try:
        text = events.with_name(SUMMARY_FILE).read_bytes()
        summary = _adapter().validate_json(text)
    except (OSError, ValidationError):
        return EventSummary(0, Progress())
    return summary if summary.version == _VERSION else EventSummary(0, Progress())


@functools.cache
def _adapter() -> TypeAdapter[EventSummary]:
    return TypeAdapter(EventSummary)
