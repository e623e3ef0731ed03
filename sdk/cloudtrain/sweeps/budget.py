"""The budget of a sweep: what is spent, what active trials hold, and what is left. Pure.

A trial starts only if its reservation fits into what is left. The reservation is the most that the cost model expects:
the time limit, and the reserve for a late stop (`planning.cost.OverLimit`), at the price of the cluster. A trial that
ends returns what it did not use. So the sum of all costs never exceeds the budget, as long as no run costs more than
its reservation. If one does, no other trial starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloudtrain.sweeps.trial import Trial

_CENT = 0.005
"""Costs are rounded to cents."""


@dataclass(frozen=True)
class Budget:
    """The budget at one moment, in US dollars.

    Attributes:
        limit_usd: `limits.cost`; None without a limit.
        spent_usd: Costs of the runs that have ended.
        reserved_usd: Reservations of the active runs.
        overrun_usd: What ended runs cost beyond their reservations.
    """

    limit_usd: float | None
    spent_usd: float = 0.0
    reserved_usd: float = 0.0
    overrun_usd: float = 0.0

    @classmethod
    def of(cls, limit_usd: float | None, trials: Iterable[Trial]) -> Budget:
        """Return the budget after these trials, which is all that it depends on."""
        spent = reserved = overrun = 0.0
        for trial in trials:
            spent += trial.settled_usd
            overrun += trial.overrun_usd
            reserved += trial.reservation_usd if trial.state.is_active else 0.0
        return cls(limit_usd, spent, reserved, overrun)

    @property
    def left_usd(self) -> float | None:
        """What neither ended nor active runs use; None without a limit."""
        return None if self.limit_usd is None else self.limit_usd - self.spent_usd - self.reserved_usd

    @property
    def is_overrun(self) -> bool:
        """Whether a run cost more than its reservation, so that no other trial may start."""
        return self.limit_usd is not None and self.overrun_usd > _CENT

    def allows(self, reservation_usd: float) -> bool:
        """Return whether a trial with this reservation may start now."""
        if self.left_usd is None:
            return True
        return not self.is_overrun and reservation_usd <= self.left_usd + 1e-9

    def can_ever_allow(self, reservation_usd: float) -> bool:
        """Return whether a trial may start when the active ones have returned all of their reservations."""
        if self.limit_usd is None:
            return True
        return not self.is_overrun and reservation_usd <= self.limit_usd - self.spent_usd + 1e-9


def settle(trial: Trial, cost_usd: float | None) -> Trial:
    """Return a trial whose run has ended: the cost takes the place of the reservation.

    Args:
        trial: The trial.
        cost_usd: Cost of the run that has ended; None if it is unknown, which counts as the reservation.
    """
    cost = trial.reservation_usd if cost_usd is None else cost_usd
    over = max(0.0, cost - trial.reservation_usd)
    return trial.but(
        settled_usd=trial.settled_usd + cost,
        overrun_usd=trial.overrun_usd + (over if over > _CENT else 0.0),
        reservation_usd=0.0,
    )
