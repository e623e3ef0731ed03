"""What AWS bills for a run and for an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

_HOUR = 3600


@dataclass(frozen=True)
class Billing:
    """What AWS bills for one run. Seconds are those of one instance.

    Attributes:
        instance_type: Instance type; empty while none is selected, and for a local run.
        instances: Number of instances.
        region: Region whose price applies.
        usd_per_hour: Price of all instances, or None if it is unknown.
        billable_seconds: Billed seconds. For spot, AWS reports fewer than the instances ran: the discount.
        training_seconds: Seconds on instances.
        warm_pool_seconds: Seconds for which the instances were kept afterwards.
        is_spot: Whether it ran on spot instances.
        restarts: How often it lost its instances and was started again.
    """

    instance_type: str = ""
    instances: int = 0
    region: str = ""
    usd_per_hour: float | None = 0.0
    billable_seconds: int = 0
    training_seconds: int = 0
    warm_pool_seconds: int = 0
    is_spot: bool = False
    restarts: int = 0

    @property
    def cost_usd(self) -> float | None:
        """The cost, or None if the price is unknown and something was billed."""
        seconds = self.billable_seconds + self.warm_pool_seconds
        if seconds == 0:
            return 0.0
        return None if self.usd_per_hour is None else self.usd_per_hour * seconds / _HOUR

    @property
    def saved_usd(self) -> float:
        """What the run would have cost more without spot; 0 if the price is unknown."""
        seconds = max(0, self.training_seconds - self.billable_seconds) if self.is_spot else 0
        return (self.usd_per_hour or 0.0) * seconds / _HOUR


@dataclass(frozen=True)
class EndpointUse:
    """An endpoint within a period.

    Attributes:
        name: Its name.
        run: Id of the run whose model it serves.
        state: Its status, such as InService, or Deleted.
        created: When it was created.
        billing: What AWS bills for its instances within the period; without an instance type it is serverless, and
            AWS bills its requests.
    """

    name: str
    run: str
    state: str
    created: datetime
    billing: Billing
