"""What was found in a log: each text once, with everybody who said it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules import (
    Place,
    Rule,
    Weight,
    first_match,
)
from cloudtrain.failure_rules.tracebacks import Raised

_GROUPS_KEPT = 200
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Moment:
    """When something was said.

    Attributes:
        host: Whose log it stands in.
        time: Seconds since the epoch, or None where the log has no clock.
        order: Number of the line in the order of reading.
        lines: Ordinary lines that its host had printed before.
        progress: Signs of progress that its host had given before.
    """

    host: str
    time: float | None
    order: int
    lines: int
    progress: int
    step: int | None = None


@dataclass(frozen=True)
class Finding:
    """One text that tells of a failure, said by one rank (None: not known) of one host.

    Attributes:
        found: What the rule's pattern has found, by name.
        was_logged: A logger printed it as a warning, so the program knew of it and went on.
    """

    rule: Rule
    found: dict[str, str]
    raised: Raised
    rank: int | None
    moment: Moment
    was_logged: bool = False

    @property
    def host(self) -> str:
        """Whose log it stands in."""
        return self.moment.host

    @property
    def weight(self) -> int:
        """The smaller, the nearer to the cause."""
        return self.rule.weight + self.was_logged


def classify(raised: Raised, before: tuple[Raised, ...] = ()) -> tuple[Rule, dict[str, str], Raised]:
    """Return the rule for an exception, what it has found, and the exception that tells most.

    An exception that no special rule knows, or only as a symptom, is explained by the one it was raised from, if that
    one is known, or is nearer to the cause.

    Args:
        raised: The exception at the end of a chain.
        before: The ones before it, the first one first.
    """
    known: list[tuple[Rule, dict[str, str], Raised]] = []
    general: tuple[Rule, dict[str, str], Raised] | None = None
    for candidate in (raised, *reversed(before)):
        matched = first_match(candidate.text, Place.EXCEPTION)
        if matched is None:
            continue
        answer = (matched[0], _groups(matched[1]), candidate)
        if matched[0].failure is not FailureClass.USER_CODE or matched[0].pattern.pattern:
            known.append(answer)
        general = general or answer
    if known:
        return min(known, key=lambda each: each[0].weight)  # of equals the last that was raised
    if general is None:
        raise AssertionError("the last rule matches everything")
    return general


def match_line(text: str, rules: tuple[Rule, ...]) -> tuple[Rule, dict[str, str]] | None:
    """Return the first of these rules that a log line matches, and what it has found."""
    for rule in rules:
        if (match := rule.pattern.search(text)) is not None:
            return rule, _groups(match)
    return None


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None}


@dataclass
class Group:
    """The same text of all who said it. `first` is the earliest; `last` tells whether the job went on after it."""

    first: Finding
    last: Moment
    members: dict[tuple[str, int | None], None] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Take in one more."""
        self.members[finding.host, finding.rank] = None
        self.last = finding.moment
        mine, new = self.first, finding
        if mine.moment.time is not None and new.moment.time is not None and new.moment.time < mine.moment.time:
            self.first = dataclasses.replace(new, raised=_richer(new.raised, mine.raised))
            return
        time = new.moment.time if mine.moment.time is None else mine.moment.time
        rank = new.rank if mine.rank is None and mine.host == new.host else mine.rank
        moment = dataclasses.replace(mine.moment, time=time)
        self.first = dataclasses.replace(mine, rank=rank, moment=moment, raised=_richer(mine.raised, new.raised))


def _richer(raised: Raised, other: Raised) -> Raised:
    if raised.last_user_frame is None and other.last_user_frame is not None:
        return dataclasses.replace(raised, frames=other.frames)
    return raised


@dataclass
class HostLog:
    """What is known of one host while its log is read.

    Attributes:
        lines: Ordinary lines so far.
        progress: Signs of progress so far.
        clock: Time of its newest event, for logs whose lines have none.
        failed_at: When its first rank failed, as the launcher says.
        root_rank: Rank that torchrun's report calls the root cause.
    """

    lines: int = 0
    progress: int = 0
    step: int | None = None
    clock: float | None = None
    failed_at: float | None = None
    root_rank: int | None = None


class Findings:
    """All groups, at most so many that a log of any length fits."""

    def __init__(self, went_on: WentOn) -> None:
        self.groups: dict[tuple[int, str], Group] = {}
        self._went_on = went_on

    def add(self, finding: Finding) -> None:
        """Take in a finding; one that the job has survived before starts anew."""
        key = (id(finding.rule), _signature(finding))
        group = self.groups.get(key)
        if group is None or self._went_on.after(group.last):
            self.groups.pop(key, None)
            group = self.groups[key] = Group(finding, finding.moment)
            self._make_room()
        group.add(finding)

    def _make_room(self) -> None:
        """Forget what the job has survived; then the newest of what is furthest from the cause, but the last."""
        if len(self.groups) <= _GROUPS_KEPT:
            return
        *older, _ = self.groups
        for key in older:
            if self._went_on.after(self.groups[key].last):
                del self.groups[key]
        if len(self.groups) > _GROUPS_KEPT:
            *older, _ = self.groups
            del self.groups[max(older, key=self._distance)]

    def _distance(self, key: tuple[int, str]) -> tuple[int, int]:
        group = self.groups[key]
        return group.first.weight, group.first.moment.order


def _signature(finding: Finding) -> str:
    """Return the text without what differs between ranks; lines of one rule are one thing."""
    if Place.EXCEPTION not in finding.rule.places or finding.rule.weight is not Weight.CAUSE:
        return ""
    return _CHANGING.sub("#", finding.raised.text.partition("\n")[0].removeprefix("error: "))


class WentOn:
    """Tells whether a job went on after something was said, so that it cannot have been the end."""

    LINES = 20
    """Ordinary lines of the same host. Dying ranks print less, apart from what is no ordinary line."""

    PROGRESS = 2
    """Signs of progress of the same host: one may be printed by a rank that has not noticed yet."""

    SECONDS = 10.0
    """Between the text and the newest sign of progress of any host: clocks differ by less."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostLog] = {}
        self.last_progress: float | None = None

    def after(self, moment: Moment) -> bool:
        """Whether the job went on after this moment."""
        log = self.hosts.get(moment.host)
        if log is not None and (
            log.lines - moment.lines >= self.LINES or log.progress - moment.progress >= self.PROGRESS
        ):
            return True
        if moment.time is None or self.last_progress is None:
            return False
        return self.last_progress - moment.time > self.SECONDS
