"""A warm pool: the cluster of a job that has ended, kept for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudtrain.planning.warm_pool import AVAILABLE


@dataclass
class SimulatedWarmPool:
    """The cluster of one job. Its job guards it with a lock.

    Attributes:
        keep_alive: Seconds that it is kept after the job.
        clock: What the time is, in seconds since the epoch.
        since: When the job left it behind, or None.
        ended: When it was taken over, given up, or found unfit, or None.
        reused_by: Name of the job that took it over, or an empty string.
    """

    keep_alive: float
    clock: Callable[[], float]
    since: float | None = None
    ended: float | None = None
    reused_by: str = ""

    @property
    def status(self) -> str:
        """WarmPoolResourceStatus."""
        if self.reused_by:
            return "Reused"
        if self.since is None and self.ended is None:
            return "InUse"
        return AVAILABLE if self.ended is None and self.clock() < self._expires else "Terminated"

    @property
    def _expires(self) -> float:
        return (self.since or 0.0) + self.keep_alive

    def leave(self, *, is_healthy: bool) -> None:
        """Begin to wait for the next job; an unfit cluster is not kept."""
        self.since = self.clock()
        if not is_healthy:
            self.ended = self.since

    def keep_for(self, seconds: float) -> None:
        """Change how long it is kept, counted from the end of its job; 0 ends it."""
        self.keep_alive = seconds
        if self.clock() >= self._expires:
            self.ended = self.clock()

    def to_json(self) -> dict[str, Any]:
        """Return WarmPoolStatus. The billed time is told when the pool is gone."""
        told: dict[str, Any] = {"Status": self.status}
        if told["Status"] in ("Reused", "Terminated") and self.since is not None:
            until = self._expires if self.ended is None else self.ended
            told["ResourceRetainedBillableTimeInSeconds"] = max(0, round(until - self.since))
        return {**told, **({"ReusedByJob": self.reused_by} if self.reused_by else {})}
