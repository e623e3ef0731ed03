"""The budget of a controller: what it reserves for each run before it starts, and what ended runs have cost. Pure.

A run starts only if its reservation fits into what is left. The reservation is the most that the cost model expects:
the time limit, and the reserve for a late stop (`planning.cost.OverLimit`), at the price of the cluster. A run that
ends returns what it did not use. So the sum of all costs never exceeds the budget, as long as no run costs more than
its reservation. If one does, no other run starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_CENT = 0.005
"""Costs are rounded to cents."""


class Paid(Protocol):
    """What holds a reservation while it is active, and has settled costs."""

    @property
    def is_active(self) -> bool:
        """Whether it holds its reservation."""

    @property
    def reservation_usd(self) -> float:
        """Part of the budget that it holds."""

    @property
    def settled_usd(self) -> float:
        """Cost of its runs that have ended."""

    @property
    def overrun_usd(self) -> float:
        """What they cost beyond their reservations."""


@dataclass(frozen=True)
class Budget:
    """The budget at one moment, in US dollars.

    Attributes:
        limit_usd: The limit; None without one.
        spent_usd: Costs of the runs that have ended.
        reserved_usd: Reservations of the active runs.
        overrun_usd: What ended runs cost beyond their reservations.
    """

    limit_usd: float | None
    spent_usd: float = 0.0
    reserved_usd: float = 0.0
    overrun_usd: float = 0.0

    @classmethod
    def of(cls, limit_usd: float | None, paid: Iterable[Paid]) -> Budget:
        """Return the budget after these, which is all that it depends on."""
        spent = reserved = overrun = 0.0
        for each in paid:
            spent += each.settled_usd
            overrun += each.overrun_usd
            reserved += each.reservation_usd if each.is_active else 0.0
        return cls(limit_usd, spent, reserved, overrun)

    @property
    def is_overrun(self) -> bool:
        """Whether a run cost more than its reservation, so that no other one may start."""
        return self.limit_usd is not None and self.overrun_usd > _CENT

    @property
    def left_usd(self) -> float:
        """What is neither spent nor reserved; infinite without a limit."""
        if self.limit_usd is None:
            return float("inf")
        return self.limit_usd - self.spent_usd - self.reserved_usd

    def allows(self, reservation_usd: float) -> bool:
        """Return whether a run with this reservation may start now."""
        return self.can_ever_allow(reservation_usd + self.reserved_usd)

    def can_ever_allow(self, reservation_usd: float) -> bool:
        """Return whether a run may start when the active ones have returned all of their reservations."""
        if self.limit_usd is None:
            return True
        return not self.is_overrun and reservation_usd <= self.limit_usd - self.spent_usd + 1e-9


def overrun_of(reservation_usd: float, cost_usd: float) -> float:
    """Return what a run cost beyond its reservation; 0 for less than a cent."""
    over = max(0.0, cost_usd - reservation_usd)
    return over if over > _CENT else 0.0
