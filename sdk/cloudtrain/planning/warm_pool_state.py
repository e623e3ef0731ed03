"""A warm pool as SageMaker reports it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class WarmPool:
    """The cluster that a run leaves behind, kept and paid for until the next job takes it.

    Attributes:
        status: `InUse`, `Available`, `Reused` or `Terminated`, as SageMaker names it.
        keep_alive_seconds: How long it is kept after the run; 0 where that is not told.
        until: When an available pool ends; None where that is not told, and in every other status.
        kept_seconds: How long it has been kept, and is charged, so far.
        usd: What that costs, or None when the price is unknown.
        reused_by: Name of the job that has taken it, or an empty string.
    """

    status: str
    keep_alive_seconds: int
    until: datetime | None = None
    kept_seconds: int = 0
    usd: float | None = None
    reused_by: str = ""

    @property
    def is_available(self) -> bool:
        """Whether it waits for a job."""
        return self.status == "Available"

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {**dataclasses.asdict(self), "until": self.until.isoformat() if self.until else None}
