"""One trial of a sweep: its values, its run, its state and its cost. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cloudtrain.controllers.budget import overrun_of
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


class TrialState(StrEnum):
    """State of a trial."""

    PLANNED = "PLANNED"
    """Its values, its reservation and the id of its run are recorded; the run may have been submitted or not."""
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    """Its run has reached a rung of hyperband. It continues if it is among the best of the rung."""
    SUCCEEDED = "SUCCEEDED"
    PRUNED = "PRUNED"
    """It was stopped early, or not continued, because others are better."""
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    REFUSED = "REFUSED"
    """The plan refuses its values. It has no run and costs nothing."""

    @property
    def is_active(self) -> bool:
        """Whether it holds a reservation."""
        return self in (TrialState.PLANNED, TrialState.RUNNING)

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return not self.is_active and self is not TrialState.WAITING


@dataclass(frozen=True)
class Trial:
    """A trial.

    Attributes:
        number: Its number, from 0.
        values: Values of the job's fields by path.
        state: Its state.
        run: Id of its last run; empty if it has none.
        earlier: Ids of the runs that the last one continues, oldest first.
        attempt: Counts the ids that were given to its runs.
        repeats: How often its run has failed for a cause outside of the sweep since the controller has started.
        slot: Its part of this machine's CPU cores or GPUs.
        length: Steps or epochs of its last run, with hyperband; else None.
        rungs: Objective by the length of each rung that it has reached, with hyperband.
        objective: Last value of the metric, or None.
        reservation_usd: Part of the budget that its active run holds.
        settled_usd: Cost of its runs that have ended.
        overrun_usd: What they cost beyond their reservations.
        reason: Why it is in this state; may be empty.
        started: When it was planned, in seconds since the epoch.
        ended: When it ended, in seconds since the epoch, or None.
    """

    number: int
    values: Mapping[str, Any]
    state: TrialState = TrialState.PLANNED
    run: str = ""
    earlier: tuple[str, ...] = ()
    attempt: int = 0
    repeats: int = 0
    slot: int = 0
    length: int | None = None
    rungs: Mapping[str, float] = field(default_factory=dict)
    objective: float | None = None
    reservation_usd: float = 0.0
    settled_usd: float = 0.0
    overrun_usd: float = 0.0
    reason: str = ""
    started: float = 0.0
    ended: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether it holds its reservation."""
        return self.state.is_active

    def but(self, **changes: Any) -> Trial:
        """Return the trial with other values."""
        return dataclasses.replace(self, **changes)

    def to_text(self) -> str:
        """Return its record."""
        return dump_json(dataclasses.asdict(self), sort_keys=True, default=str)

    @classmethod
    def from_text(cls, text: str) -> Trial:
        """Return the trial of a record."""
        content = load_json(text)
        return cls(
            **{
                **content,
                "state": TrialState(content["state"]),
                "earlier": tuple(content["earlier"]),
            },
        )


def settle(trial: Trial, cost_usd: float | None) -> Trial:
    """Return a trial whose run has ended: the cost takes the place of the reservation.

    Args:
        trial: The trial.
        cost_usd: Cost of the run that has ended; None if it is unknown, which counts as the reservation.
    """
    cost = trial.reservation_usd if cost_usd is None else cost_usd
    return trial.but(
        settled_usd=trial.settled_usd + cost,
        overrun_usd=trial.overrun_usd + overrun_of(trial.reservation_usd, cost),
        reservation_usd=0.0,
    )
