"""Errors found in a log, grouped by message over all ranks."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from dataclasses import dataclass, field

from cloudtrain.failure_rules.rules import Causality, Rule, Source, first_match
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


Classified = tuple[Rule, dict[str, str], RaisedException]
"""A rule, the named groups of its pattern, and the exception that it matches."""


def classify(raised: RaisedException, before: tuple[RaisedException, ...] = ()) -> Classified:
    """Return the rule for a chain of exceptions, of which `raised` is the last.

    If only the general rule matches an exception, or it is a symptom, the exception that it was raised from decides,
    provided that a specific rule matches that one.
    """
    chain = (raised, *reversed(before))
    matches = [
        (*match, each)
        for each in chain
        if (match := first_match(each.text, Source.EXCEPTION, each.file, each.imported)) is not None
    ]
    specific = [match for match in matches if not match[0].is_general]
    # Of several, the last that was raised.
    return min(specific or matches[:1], key=lambda match: match[0].causality)


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
        mine = self.first
        time = mine.position.time
        new_time = report.position.time
        if time is not None and new_time is not None and new_time < time:
            exception = _richer(report.exception, mine.exception)
            self.first = dataclasses.replace(report, exception=exception)
            return
        rank = mine.rank
        if rank is None and mine.host == report.host:
            # A line without a prefix, of which another line of the host names the rank.
            rank = report.rank
        self.first = dataclasses.replace(
            mine,
            rank=rank,
            position=dataclasses.replace(mine.position, time=new_time if time is None else time),
            exception=_richer(mine.exception, report.exception),
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

    @property
    def reported_rank(self) -> int | None:
        """Rank that torchrun or the launcher reports as the root cause, or None."""
        return None if self.root_rank == -1 else self.root_rank


class ErrorGroups:
    """The error groups of a log. Their number is limited, so that memory does not grow with the log."""

    def __init__(self, tracker: ProgressTracker) -> None:
        self.groups: dict[tuple[int, str], ErrorGroup] = {}
        self._tracker = tracker

    def add(self, report: ErrorReport) -> None:
        """Add a report. If the job has survived the same error before, the report starts a new group."""
        rule = report.rule
        # The message without parts that differ between ranks; empty for rules whose matches form one group.
        message = ""
        if Source.EXCEPTION in rule.sources and rule.causality is Causality.CAUSE:
            message = report.exception.text.partition("\n")[0].removeprefix("error: ")
        key = (id(rule), _CHANGING.sub("#", message))
        group = self.groups.get(key)
        if group is None or self._tracker.has_progressed_since(group.last):
            self.groups.pop(key, None)
            group = self.groups[key] = ErrorGroup(report, report.position)
            self._make_room()
        group.add(report)

    def _make_room(self) -> None:
        """Drop a survived error, or the newest error that is furthest from the cause. The last group stays."""
        if len(self.groups) <= _GROUPS_KEPT:
            return

        def rank(key: tuple[int, str]) -> tuple[bool, int, int]:
            group = self.groups[key]
            return (
                self._tracker.has_progressed_since(group.last),
                group.first.causality,
                group.first.position.order,
            )

        *older, _ = self.groups
        del self.groups[max(older, key=rank)]


class ProgressTracker:
    """Decides whether a job made progress after a position in its log."""

    LINES = 20
    """Ordinary lines of the same host that count as progress. Failing ranks print fewer."""

    PROGRESS = 2
    """Progress events of the same host that count as progress. One may come from a rank that has not failed yet."""

    SECONDS = 10.0
    """Time between the error and the newest progress event of any host. The hosts' clocks differ by less."""

    def __init__(self) -> None:
        self.hosts: defaultdict[str, HostLog] = defaultdict(HostLog)
        self.last_progress: float | None = None

    def has_progressed_since(self, position: LogPosition) -> bool:
        """Whether the job made progress after this position."""
        log = self.hosts.get(position.host)
        if log is not None:
            has_lines = log.lines - position.lines >= self.LINES
            has_progress = log.progress - position.progress >= self.PROGRESS
            if has_lines or has_progress:
                return True
        if position.time is None or self.last_progress is None:
            return False
        return self.last_progress - position.time > self.SECONDS
