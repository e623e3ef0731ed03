"""The budget of the day: the largest possible bill of a trial is reserved before anything of it starts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


class OverBudgetError(Exception):
    """A reservation would exceed the budget."""


@dataclass
class Ledger:
    """What is reserved and what was billed, in US dollars. Thread-safe.

    A reservation is replaced by the bill once AWS has reported the bill of all jobs that it was made for. A job whose
    bill is unknown stays reserved.
    """

    budget_usd: float
    reserved: dict[str, float] = field(default_factory=dict)
    billed: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def committed_usd(self) -> float:
        """Bills, and reservations that have none yet."""
        with self._lock:
            return self._committed()

    @property
    def left_usd(self) -> float:
        """What can still be reserved."""
        return self.budget_usd - self.committed_usd

    def _committed(self) -> float:
        return sum(self.billed.get(name, usd) for name, usd in self.reserved.items())

    def reserve(self, name: str, usd: float) -> None:
        """Reserve the largest possible bill of a trial.

        Raises:
            OverBudgetError: It does not fit; nothing is reserved.
        """
        with self._lock:
            left = self.budget_usd - self._committed()
            # Sums of floats: a reservation of exactly what is left fits.
            if usd > left + 1e-9:
                raise OverBudgetError(
                    f"its largest bill is {usd:.2f} USD, and {max(0.0, left):.2f} of"
                    f" {self.budget_usd:.2f} USD are left"
                )
            self.reserved[name] = usd

    def release(self, name: str) -> None:
        """Give back the reservation of a trial that has started nothing."""
        with self._lock:
            self.reserved.pop(name, None)

    def settle(self, name: str, usd: float) -> None:
        """Replace a reservation by the bill."""
        with self._lock:
            self.billed[name] = usd

    def to_json(self) -> dict[str, float]:
        """Return the sums for the result."""
        return {
            "budget_usd": self.budget_usd,
            "reserved_usd": round(sum(self.reserved.values()), 4),
            "committed_usd": round(self.committed_usd, 4),
        }
