"""Errors found in a log, grouped by message over all ranks."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules import (
    Causality,
    Rule,
    Source,
    first_match,
)
from cloudtrain.failure_rules.tracebacks import RaisedException

_GROUPS_KEPT = 200
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class LogPosition:
    """Where and when a line was printed.

    Attributes:
        host: The host.
        time: Seconds since the epoch, or None if the log has no times.
        order: Number of the line in the order of reading.
        lines: Number of ordinary lines of the host before it.
        progress: Number of progress events of the host before it.
        step: Newest step of the host before it.
    """

    host: str
    time: float | None
    order: int
    lines: int
    progress: int
    step: int | None = None


@dataclass(frozen=True)
class ErrorReport:
    """An error that one rank of one host printed.

    Attributes:
        rule: The rule that matched.
        found: The named groups of the rule's pattern.
        exception: The exception or line.
        rank: The rank, or None if it is unknown.
        position: Where it was printed.
        is_logged: Whether a logger printed it as a warning, so that the program handled it.
    """

    rule: Rule
    found: dict[str, str]
    exception: RaisedException
    rank: int | None
    position: LogPosition
    is_logged: bool = False

    @property
    def host(self) -> str:
        """The host that printed it."""
        return self.position.host

    @property
    def causality(self) -> int:
        """How close it is to the cause; the smallest value is closest."""
        return self.rule.causality + self.is_logged


def classify(
    raised: RaisedException, before: tuple[RaisedException, ...] = ()
) -> tuple[Rule, dict[str, str], RaisedException]:
    """Return the rule for a chain of exceptions, of which `raised` is the last, its groups and the matching exception.

    If only the general rule matches an exception, or it is a symptom, the exception that it was raised from decides,
    provided that a specific rule matches that one.
    """
    known: list[tuple[Rule, dict[str, str], RaisedException]] = []
    general: tuple[Rule, dict[str, str], RaisedException] | None = None
    for candidate in (raised, *reversed(before)):
        matched = first_match(candidate.text, Source.EXCEPTION)
        if matched is None:
            continue
        answer = (matched[0], groups_of(matched[1]), candidate)
        if matched[0].failure_class is not FailureClass.USER_CODE or matched[0].pattern.pattern:
            known.append(answer)
        general = general or answer
    if known:
        return min(known, key=lambda each: each[0].causality)  # of several, the last that was raised
    if general is None:
        raise AssertionError("the last rule matches everything")
    return general


def groups_of(match: re.Match[str]) -> dict[str, str]:
    """Return the named groups of a match that took part in it."""
    return {name: value for name, value in match.groupdict().items() if value is not None}


@dataclass
class ErrorGroup:
    """The same error on all ranks that printed it: its earliest report, and hosts and ranks in order as keys."""

    first: ErrorReport
    last: LogPosition
    members: dict[tuple[str, int | None], None] = field(default_factory=dict)

    def add(self, report: ErrorReport) -> None:
        """Add a report."""
        self.members[report.host, report.rank] = None
        self.last = report.position
        mine, new = self.first, report
        if mine.position.time is not None and new.position.time is not None and new.position.time < mine.position.time:
            self.first = dataclasses.replace(new, exception=_richer(new.exception, mine.exception))
            return
        time = new.position.time if mine.position.time is None else mine.position.time
        rank = new.rank if mine.rank is None and mine.host == new.host else mine.rank
        position = dataclasses.replace(mine.position, time=time)
        self.first = dataclasses.replace(
            mine, rank=rank, position=position, exception=_richer(mine.exception, new.exception)
        )


def _richer(raised: RaisedException, other: RaisedException) -> RaisedException:
    if raised.last_user_frame is None and other.last_user_frame is not None:
        return dataclasses.replace(raised, frames=other.frames)
    return raised


@dataclass
class HostLog:
    """State of one host while its log is read.

    Attributes:
        lines: Number of ordinary lines so far.
        progress: Number of progress events so far.
        step: Newest step.
        clock: Time of the newest event, for logs without times.
        failed_at: When the first rank failed, from the launcher's report.
        root_rank: Rank that torchrun reports as the root cause; -1 while its report is being read.
    """

    lines: int = 0
    progress: int = 0
    step: int | None = None
    clock: float | None = None
    failed_at: float | None = None
    root_rank: int | None = None


class ErrorGroups:
    """The error groups of a log. Their number is limited, so that memory does not grow with the log."""

    def __init__(self, tracker: ProgressTracker) -> None:
        self.groups: dict[tuple[int, str], ErrorGroup] = {}
        self._tracker = tracker

    def add(self, report: ErrorReport) -> None:
        """Add a report. If the job has survived the same error before, the report starts a new group."""
        # The message without parts that differ between ranks; empty for rules whose matches form one group.
        is_cause = Source.EXCEPTION in report.rule.sources and report.rule.causality is Causality.CAUSE
        message = report.exception.text.partition("\n")[0].removeprefix("error: ") if is_cause else ""
        key = (id(report.rule), _CHANGING.sub("#", message))
        group = self.groups.get(key)
        if group is None or self._tracker.has_progressed_since(group.last):
            self.groups.pop(key, None)
            group = self.groups[key] = ErrorGroup(report, report.position)
            self._make_room()
        group.add(report)

    def _make_room(self) -> None:
        """Drop survived errors; if that is not enough, the newest error that is furthest from the cause.

        The last group stays in any case.
        """
        if len(self.groups) <= _GROUPS_KEPT:
            return
        *older, _ = self.groups
        for key in older:
            if self._tracker.has_progressed_since(self.groups[key].last):
                del self.groups[key]
        if len(self.groups) > _GROUPS_KEPT:
            *older, _ = self.groups
            firsts = {key: self.groups[key].first for key in older}
            del self.groups[max(older, key=lambda key: (firsts[key].causality, firsts[key].position.order))]


class ProgressTracker:
    """Decides whether a job made progress after a position in its log."""

    LINES = 20
    """Ordinary lines of the same host that count as progress. Failing ranks print fewer."""

    PROGRESS = 2
    """Progress events of the same host that count as progress. One may come from a rank that has not failed yet."""

    SECONDS = 10.0
    """Time between the error and the newest progress event of any host. The hosts' clocks differ by less."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostLog] = {}
        self.last_progress: float | None = None

    def has_progressed_since(self, position: LogPosition) -> bool:
        """Whether the job made progress after this position."""
        log = self.hosts.get(position.host)
        if log is not None and (
            log.lines - position.lines >= self.LINES or log.progress - position.progress >= self.PROGRESS
        ):
            return True
        if position.time is None or self.last_progress is None:
            return False
        return self.last_progress - position.time > self.SECONDS
