"""Filter for lists of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudtrain.runs.status import State, Status
from cloudtrain.support.run_id import submitted_at


def submission_time(status: Status) -> datetime:
    """Return by what lists are ordered; a run that does not tell it is older than all others."""
    return status.created or datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class RunFilter:
    """Which runs are wanted. What is not given is not asked for.

    Attributes:
        name: Part of the run id, as it is written.
        states: Any of these.
        tags: All of these, by key.
        since: Submitted then or later.
        until: Submitted before then.
    """

    name: str = ""
    states: frozenset[State] = frozenset()
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None

    def accepts(self, status: Status) -> bool:
        """Whether a run is wanted, as far as its status tells; a status holds no tags."""
        is_wanted = not self.states or status.state in self.states
        return is_wanted and self.accepts_run(status.run, status.created)

    def accepts_run(self, run: str, submitted: datetime | None = None) -> bool:
        """Whether a run of this id is wanted, whatever its state.

        Args:
            run: Run id.
            submitted: When; by default as the run id says.
        """
        moment = submitted or submitted_at(run)
        if self.name not in run or (moment is None and (self.since or self.until)):
            return False
        is_late_enough = self.since is None or moment is None or moment >= self.since
        return is_late_enough and (self.until is None or moment is None or moment < self.until)

    def accepts_tags(self, tags: Mapping[str, str]) -> bool:
        """Whether a run with these tags is wanted."""
        return self.tags.items() <= tags.items()


ALL_RUNS = RunFilter()
