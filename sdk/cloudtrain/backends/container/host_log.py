"""The log of one host of a local run, with a time for each line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.backends.container.job_folder import host_of
from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.support.run_id import submitted_at
from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event

_TOLERANCE_SECONDS = 60.0


class HostLog:
    """Reads the new lines of a host's log, which records no times.

    A line has the time of its event. Other lines have the newest time that is
    known to be before them, so that the times of a host never decrease.

    Args:
        path: The log.
        run: The run's id, which contains the time of its submit.
        offset: Offset in bytes of the first line to read.
    """

    def __init__(self, path: Path, run: str, *, offset: int = 0) -> None:
        submitted = submitted_at(run)
        self._begin = self._newest = 0.0 if submitted is None else submitted.timestamp()
        self._path = path
        self._tail = LineTail(path, start=offset)

    def read(self, *, final: bool, at_least: float) -> Iterator[LogLine]:
        """Yield the new lines.

        Args:
            final: Whether the log is complete, so that a last part without a newline is a line, too.
            at_least: A time before which the new lines were not in the log.

        Raises:
            OSError: The log cannot be read.
        """
        end = self._changed()
        self._newest = max(self._newest, at_least)
        for line in self._tail.read(final=final):
            text = line.decode("utf-8", "replace").rstrip("\r")
            own = _event_time(text) if EVENT_PREFIX in text else None
            # A time before the run or after the last change of the log is data that the job prints.
            if (
                own is not None
                and self._begin - _TOLERANCE_SECONDS <= own <= end + _TOLERANCE_SECONDS
            ):
                self._newest = max(self._newest, own)
            raw = None if text.encode() == line else line
            yield LogLine(
                host=host_of(self._path),
                text=text,
                time=self._newest,
                raw=raw,
                is_estimated=True,
            )

    def _changed(self) -> float:
        """Return when the log was changed last."""
        try:
            return self._path.stat().st_mtime
        except OSError:
            # The open file was deleted and may still grow.
            return time.time()

    def close(self) -> None:
        """Close the file."""
        self._tail.close()


def find_since(path: Path, since: float) -> int:
    """Return the offset of the lines that may be newer than a time: after the last older event."""
    if path.stat().st_mtime < since:
        return path.stat().st_size
    found = 0
    tail = LineTail(path)
    with contextlib.closing(tail):
        for line in tail.read():
            event = None
            if EVENT_PREFIX.encode() in line:
                event = parse_event(line.decode("utf-8", "replace"))
            written = None if event is None else event.get("time")
            if written is not None and written < since:
                found = tail.offset
    return found


def _event_time(text: str) -> float | None:
    event = parse_event(text)
    return None if event is None else event.get("time")
