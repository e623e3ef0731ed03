"""Operations of a run that has only a log and statuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cloudtrain.aws.retry import Backoff
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.status import State, Status


def event_line(event: Mapping[str, Any]) -> LogLine:
    """Return the log line of an event."""
    return LogLine("algo-1", f"CLOUDTRAIN {json.dumps(event)}", event.get("time"))


class LoggedRun:
    """A run with a log of these events, whose status is each of these in turn, then the last.

    Args:
        events: Its events.
        statuses: Its statuses; an exception is raised.
    """

    name = "local"

    def __init__(
        self,
        events: Iterable[Mapping[str, Any]] = (),
        statuses: Iterable[Status | BaseException] = (),
    ) -> None:
        self._events = tuple(events)
        self._statuses = [*statuses] or [Status("x", self.name, State.SUCCEEDED)]

    def poll_backoff(self) -> Backoff:
        return Backoff(0.0, 0.0)

    def status(self, run: str) -> Status:
        del run
        found = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        if isinstance(found, BaseException):
            raise found
        return found

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        del run, follow, on_trouble
        return filter(only.wants, map(event_line, self._events))

    def facts(self, run: str) -> Mapping[str, str]:
        del run
        return {}

    def plan_of(self, run: str) -> Mapping[str, Any]:
        del run
        return {}

    def stop(self, run: str) -> None:
        del run

    def end_warm_pool(self, run: str) -> None:
        del run
