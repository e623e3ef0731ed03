"""A simulated warm pool: the cluster of an ended job, kept for the next job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudtrain.planning.warm_pool import AVAILABLE


@dataclass
class SimulatedWarmPool:
    """The warm pool of one job, guarded by the job's lock.

    Attributes:
        keep_alive_seconds: Time that the pool is kept after the job.
        clock: Callback that returns the time in seconds since the epoch.
        available_since: When the job ended, or None.
        ended: When the pool was reused, terminated or found unhealthy, or None.
        reused_by: Name of the job that reused it, or an empty string.
    """

    keep_alive_seconds: float
    clock: Callable[[], float]
    available_since: float | None = None
    ended: float | None = None
    reused_by: str = ""

    @property
    def status(self) -> str:
        """WarmPoolResourceStatus."""
        if self.reused_by:
            return "Reused"
        if self.available_since is None and self.ended is None:
            return "InUse"
        return AVAILABLE if self.ended is None and self.clock() < self._expires else "Terminated"

    @property
    def _expires(self) -> float:
        return (self.available_since or 0.0) + self.keep_alive_seconds

    def release(self, *, is_healthy: bool) -> None:
        """Make the pool available after its job; an unhealthy cluster is not kept."""
        self.available_since = self.clock()
        if not is_healthy:
            self.ended = self.available_since

    def keep_for(self, seconds: float) -> None:
        """Change how long it is kept, counted from the end of its job; 0 terminates it."""
        self.keep_alive_seconds = seconds
        if self.clock() >= self._expires:
            self.ended = self.clock()

    def to_json(self) -> dict[str, Any]:
        """Return WarmPoolStatus. It has the billed time once the pool has ended."""
        status: dict[str, Any] = {"Status": self.status}
        if status["Status"] in ("Reused", "Terminated") and self.available_since is not None:
            until = self._expires if self.ended is None else self.ended
            status["ResourceRetainedBillableTimeInSeconds"] = max(0, round(until - self.available_since))
        return {**status, **({"ReusedByJob": self.reused_by} if self.reused_by else {})}
