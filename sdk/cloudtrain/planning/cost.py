"""Time limits of a run, and the estimate of what it costs when it reaches them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloudtrain.catalog import Prices
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Diagnostics
from cloudtrain.planning.warm_pool import MAX_KEEP_ALIVE_SECONDS
from cloudtrain.support.units import format_duration

STOP_SECONDS = 120
"""Longest time between the end of MaxRuntime and the end of the containers. Source: AWS's StopTrainingJob reference."""
_MIN_RUNTIME_SECONDS = 60


@dataclass(frozen=True)
class CostPlan:
    """Estimate of what the run costs when it reaches its time limits; None when the price is unknown.

    AWS limits times, not costs. The estimate leaves out data download and upload, time that AWS takes to enforce a
    limit beyond `STOP_SECONDS`, storage and data transfer.

    Attributes:
        usd_per_hour: Of the whole cluster, on demand, in US dollars. With preferences that of the dearest.
        max_usd: `usd_per_hour` x the time limit, the time to stop and the warm pool. With spot that is the on-demand
            price for all of max_wait; what is paid is less.
        price_as_of: Day of the price, as YYYY-MM-DD.
        warm_pool_usd: Part of `max_usd` that the cluster costs while it is kept warm after the run, when no job takes
            it over; 0 when none is kept.
    """

    usd_per_hour: float | None
    max_usd: float | None
    price_as_of: str | None
    warm_pool_usd: float | None = 0.0


@dataclass(frozen=True)
class TimeLimits:
    """How long the run may go on, in seconds.

    Attributes:
        runtime: After which the job is stopped.
        wait: Waiting and training together, with spot; else None.
        billed: Time that the estimate counts: all of `wait` with spot, else `runtime`, then the time to stop and the
            warm pool.
    """

    runtime: int
    wait: int | None
    billed: int


@dataclass(frozen=True)
class ClusterPrice:
    """What the whole cluster costs on demand, in USD per hour, and the day of that price, as YYYY-MM-DD."""

    usd_per_hour: float
    as_of: str


def price_cluster(spec: JobSpec, region: str, prices: Prices) -> ClusterPrice | None:
    """Return what the cluster costs, or None when one of its types has no known price.

    With preferences any of the types may be chosen: the dearest bounds the cost.
    """
    known = [price for name in spec.cluster.types if (price := prices.find(name, region)) is not None]
    if len(known) < len(spec.cluster.types):
        return None
    dearest = max(known, key=lambda price: price.usd_per_hour)
    return ClusterPrice(dearest.usd_per_hour * spec.cluster.instances, min(price.as_of for price in known))


def compute_time_limits(spec: JobSpec, rate: ClusterPrice | None, region: str, diagnostics: Diagnostics) -> TimeLimits:
    """Return the time limits of a run; without a `limits.runtime` they are shortened to what `limits.cost` pays for."""
    spot = spec.cluster.spot
    runtime = spec.limits.runtime
    if spot is not None and spot.max_wait is not None:
        runtime = min(runtime, spot.max_wait)  # the default runtime gives way; one that was asked for was refused
    warm = spec.cluster.keep_alive or 0
    limit = spec.limits.cost
    affordable: float = math.inf
    if limit is not None and rate is None:
        message = f"no price is known for {', '.join(spec.cluster.types)} in {region}, so no ceiling can be kept"
        hint = "cloudtrain prices --refresh, or remove limits.cost and bound limits.runtime"
        diagnostics.add_error(("limits", "cost"), message, hint)
    elif limit is not None and rate is not None:
        affordable = max(math.floor(limit / rate.usd_per_hour * 3600) - warm - STOP_SECONDS, 0)
        _check_affordable(spec, int(affordable), rate.usd_per_hour, diagnostics)
    if affordable < runtime:
        diagnostics.add_decision(
            f"runtime: {format_duration(affordable)} instead of {format_duration(runtime)}, "
            f"so that its estimated cost stays within {limit:g} USD"
        )
        runtime = max(int(affordable), _MIN_RUNTIME_SECONDS)
    wait = None if spot is None else spot.max_wait or int(min(2 * runtime, affordable))
    return TimeLimits(runtime, wait, (wait or runtime) + STOP_SECONDS + warm)


def _check_affordable(spec: JobSpec, affordable: int, hourly: float, diagnostics: Diagnostics) -> None:
    """Refuse a cost limit that leaves less than a minute, or less than the job asks for by itself."""
    pays = f"{spec.limits.cost:g} USD pays for {format_duration(affordable)} of {hourly:.2f} USD per hour"
    warm = f" and {format_duration(spec.cluster.keep_alive)} of keep_alive" if spec.cluster.keep_alive else ""
    pays += f", {format_duration(STOP_SECONDS)} to stop{warm} after it"
    spot = spec.cluster.spot
    asked = [("limits.runtime", spec.limits.runtime)] if "runtime" in spec.limits.model_fields_set else []
    if spot is not None and spot.max_wait is not None:
        asked.append(("cluster.spot.max_wait", spot.max_wait))
    name, longest = max(asked, key=lambda item: item[1], default=("", 0))
    needed = math.ceil((longest + (spec.cluster.keep_alive or 0) + STOP_SECONDS) * hourly / 3600)
    if affordable < _MIN_RUNTIME_SECONDS:
        diagnostics.add_error(("limits", "cost"), pays, "raise limits.cost, or take fewer or smaller instances")
    elif affordable < longest:
        hint = f"raise it to {needed} USD, or lower {name} to {affordable // 60}m"
        diagnostics.add_error(("limits", "cost"), f"{pays}; {name} asks for {format_duration(longest)}", hint)


def estimate_cost(
    spec: JobSpec, rate: ClusterPrice | None, region: str, time: TimeLimits, diagnostics: Diagnostics
) -> CostPlan:
    """Return the estimate of what the run costs when it reaches its time limits."""
    if (spec.cluster.keep_alive or 0) > MAX_KEEP_ALIVE_SECONDS:
        longest, asked = format_duration(MAX_KEEP_ALIVE_SECONDS), format_duration(spec.cluster.keep_alive or 0)
        diagnostics.add_warning(
            f"cluster.keep_alive: AWS's guide allows {longest}; its API takes {asked}, but may not keep it so long"
        )
    if rate is None:
        diagnostics.add_warning(
            f"no price is known for {', '.join(spec.cluster.types)} in {region}: cloudtrain prices --refresh"
        )
        return CostPlan(None, None, None, None if spec.cluster.keep_alive else 0.0)
    # Rounded up, so that rounding never puts the estimate below a limit that it exceeds.
    estimate = math.ceil(rate.usd_per_hour * time.billed / 36) / 100
    warm = math.ceil(rate.usd_per_hour * (spec.cluster.keep_alive or 0) / 36) / 100
    return CostPlan(round(rate.usd_per_hour, 4), estimate, rate.as_of, warm)
