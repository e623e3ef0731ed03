"""Filter for lists of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudtrain.errors import UserError
from cloudtrain.runs.log_lines import TIME_HINT
from cloudtrain.runs.status import State, Status, parse_state
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.one_or_more import one_or_more
from cloudtrain.support.run_id import submitted_at


def submission_time(status: Status) -> datetime:
    """Return the time by which lists are sorted. Runs without one are the oldest."""
    return status.created or datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class RunFilter:
    """Selects runs by all the given values.

    Attributes:
        name: Part of the run id, case-sensitive.
        states: Any of these states; empty for all.
        tags: Required tags, by key.
        since: Submitted at this time or later, with a time zone.
        until: Submitted before this time.
    """

    name: str = ""
    states: Collection[State | str] = frozenset()
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UserError: A value has another type, a time has no zone, or there is no such state.
        """
        check_type("name", self.name, str)
        check_type("tags", self.tags, Mapping)
        object.__setattr__(self, "states", frozenset(map(parse_state, one_or_more(self.states))))
        for name in ("since", "until"):
            moment: object = getattr(self, name)
            if moment is None:
                continue
            if not isinstance(moment, datetime):
                raise UserError(f"{name}: expected a datetime, got {moment!r}", TIME_HINT)
            if moment.tzinfo is None:
                raise UserError(f"{name}: {moment} has no time zone", TIME_HINT)

    def accepts(self, status: Status) -> bool:
        """Whether a run is selected, ignoring tags, which a status does not contain."""
        has_state = not self.states or status.state in self.states
        return has_state and self.accepts_run(status.run, status.created)

    def accepts_run(self, run: str, submitted: datetime | None = None) -> bool:
        """Whether a run is selected by id and time of its submit, by default the time in the run id."""
        moment = submitted or submitted_at(run)
        if self.name not in run or (moment is None and (self.since or self.until)):
            return False
        is_late_enough = self.since is None or moment is None or moment >= self.since
        return is_late_enough and (self.until is None or moment is None or moment < self.until)

    def accepts_tags(self, tags: Mapping[str, str]) -> bool:
        """Whether a run with these tags is selected."""
        return self.tags.items() <= tags.items()


ALL_RUNS = RunFilter()


def check_filter(given: object) -> None:
    """Raise a UserError if this is no filter, such as the name of a job."""
    if not isinstance(given, RunFilter):
        raise UserError(
            f"expected a RunFilter, got {given!r}", f"for example RunFilter(name={str(given)!r})"
        )
