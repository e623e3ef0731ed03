"""Time limits of a run, and its estimated cost when it reaches them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cloudtrain.catalog import Prices
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Step, decision, error, warning
from cloudtrain.planning.warm_pool import MAX_KEEP_ALIVE_SECONDS
from cloudtrain.support.units import format_duration

STOP_SECONDS = 120
"""Longest time from the end of MaxRuntime to the end of the containers. Source: AWS's StopTrainingJob reference."""
_MIN_RUNTIME_SECONDS = 60


@dataclass(frozen=True)
class CostPlan:
    """Estimated cost of a run that reaches its time limits; None where the price is unknown.

    AWS limits times, not costs. The estimate does not include data download and upload, the time beyond `STOP_SECONDS`
    that AWS takes to enforce a limit, storage and data transfer.

    Attributes:
        usd_per_hour: On-demand price of the cluster, in US dollars; with preferences, of the most expensive type.
        max_usd: `usd_per_hour` x (time limit + time to stop + warm pool). With spot, the on-demand price for all of
            max_wait, which is more than the real cost.
        price_as_of: Day of the price, as YYYY-MM-DD.
        warm_pool_usd: Part of `max_usd` for the warm pool after the run, if no other job uses it; 0 without keep_alive.
    """

    usd_per_hour: float | None
    max_usd: float | None
    price_as_of: str | None
    warm_pool_usd: float | None = 0.0


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a run.

    Attributes:
        runtime_seconds: Training time after which the job is stopped.
        wait_seconds: Limit of waiting and training together, with spot; else None.
        billed_seconds: Time that the estimate counts: `wait_seconds` with spot, else `runtime_seconds`, plus the time
            to stop and the warm pool.
    """

    runtime_seconds: int
    wait_seconds: int | None
    billed_seconds: int


@dataclass(frozen=True)
class ClusterPrice:
    """On-demand price of a cluster in USD per hour, and the day of the price as YYYY-MM-DD."""

    usd_per_hour: float
    as_of: str


def price_cluster(spec: JobSpec, region: str, prices: Prices) -> ClusterPrice | None:
    """Return the price of the cluster, or None when the price of one of its types is unknown.

    With preferences it is that of the most expensive type, because any of them may be chosen.
    """
    known = [price for name in spec.cluster.types if (price := prices.find(name, region)) is not None]
    if len(known) < len(spec.cluster.types):
        return None
    most_expensive = max(known, key=lambda price: price.usd_per_hour)
    return ClusterPrice(most_expensive.usd_per_hour * spec.cluster.instances, min(price.as_of for price in known))


def compute_time_limits(spec: JobSpec, price: ClusterPrice | None, region: str) -> Step[TimeLimits]:
    """Return the time limits of a run.

    Without `limits.runtime`, the default runtime is shortened so that the estimated cost stays within `limits.cost`.
    """
    spot = spec.cluster.spot
    runtime = spec.limits.runtime
    if spot is not None and spot.max_wait is not None:
        runtime = min(runtime, spot.max_wait)  # only a default runtime can be longer: JobSpec rejects another
    warm = spec.cluster.keep_alive or 0
    limit = spec.limits.cost
    affordable: float = math.inf
    if limit is not None and price is None:
        message = f"no price is known for {', '.join(spec.cluster.types)} in {region}, so the cost cannot be limited"
        hint = "cloudtrain prices --refresh, or remove limits.cost and bound limits.runtime"
        yield error(("limits", "cost"), message, hint)
    elif limit is not None and price is not None:
        affordable = max(math.floor(limit / price.usd_per_hour * 3600) - warm - STOP_SECONDS, 0)
        yield from _check_affordable(spec, int(affordable), price.usd_per_hour)
    if affordable < runtime:
        yield decision(
            f"runtime: {format_duration(affordable)} instead of {format_duration(runtime)}, "
            f"so that its estimated cost stays within {limit:g} USD"
        )
        runtime = max(int(affordable), _MIN_RUNTIME_SECONDS)
    wait = None if spot is None else spot.max_wait or int(min(2 * runtime, affordable))
    return TimeLimits(runtime, wait, (wait or runtime) + STOP_SECONDS + warm)


def _check_affordable(spec: JobSpec, affordable: int, hourly: float) -> Iterator[Diagnostic]:
    """Reject a cost limit that pays for less than a minute, or for less than the time limits in the job."""
    pays = f"{spec.limits.cost:g} USD pays for {format_duration(affordable)} of {hourly:.2f} USD per hour"
    warm = f" and {format_duration(spec.cluster.keep_alive)} of keep_alive" if spec.cluster.keep_alive else ""
    pays += f", {format_duration(STOP_SECONDS)} to stop{warm} after it"
    spot = spec.cluster.spot
    given = [("limits.runtime", spec.limits.runtime)] if "runtime" in spec.limits.model_fields_set else []
    if spot is not None and spot.max_wait is not None:
        given.append(("cluster.spot.max_wait", spot.max_wait))
    name, longest = max(given, key=lambda item: item[1], default=("", 0))
    needed = math.ceil((longest + (spec.cluster.keep_alive or 0) + STOP_SECONDS) * hourly / 3600)
    if affordable < _MIN_RUNTIME_SECONDS:
        yield error(("limits", "cost"), pays, "raise limits.cost, or take fewer or smaller instances")
    elif affordable < longest:
        hint = f"raise it to {needed} USD, or lower {name} to {affordable // 60}m"
        yield error(("limits", "cost"), f"{pays}; {name} is {format_duration(longest)}", hint)


def estimate_cost(spec: JobSpec, price: ClusterPrice | None, region: str, limits: TimeLimits) -> Step[CostPlan]:
    """Return the estimated cost of a run that reaches its time limits."""
    if (spec.cluster.keep_alive or 0) > MAX_KEEP_ALIVE_SECONDS:
        longest, given = format_duration(MAX_KEEP_ALIVE_SECONDS), format_duration(spec.cluster.keep_alive or 0)
        yield warning(
            f"cluster.keep_alive: AWS documents at most {longest}; its API accepts {given}, which may be ignored"
        )
    if price is None:
        yield warning(f"no price is known for {', '.join(spec.cluster.types)} in {region}: cloudtrain prices --refresh")
        return CostPlan(None, None, None, None if spec.cluster.keep_alive else 0.0)
    # Rounded up, so that an estimate above the limit never rounds to the limit.
    estimate = math.ceil(price.usd_per_hour * limits.billed_seconds / 36) / 100
    warm = math.ceil(price.usd_per_hour * (spec.cluster.keep_alive or 0) / 36) / 100
    return CostPlan(round(price.usd_per_hour, 4), estimate, price.as_of, warm)
