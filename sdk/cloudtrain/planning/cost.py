"""Time limits of a run, and the three words about its cost: estimate, limit, and what the limit does not cover.

- The *estimate* is what AWS bills for the instances of a run that reaches its time limit: the limit, and what is billed
  beyond it (`OverLimit`).
- The *limit* is `limits.cost`. The time limit is chosen, or refused, so that the estimate stays within it. AWS
  enforces times, not costs, so the limit holds as far as the estimate does.
- *Not covered* by the limit is what the estimate does not count (`CostPlan.not_covered`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cloudtrain.catalog import Prices, find_instance, s3_upload_bytes_per_second
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.sections.cluster import Choice
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Step, decision, error, warning
from cloudtrain.support.units import format_duration, format_usd

STOP_SECONDS = 120
"""Longest time from a stop request to the end of the containers. Source: AWS's StopTrainingJob reference."""
OVERRUN_SECONDS = 841 - 603 - STOP_SECONDS
"""Start-up, upload of the results and AWS's late enforcement of MaxRuntime, together.

A job with MaxRuntime 603 s had a training time of 841 s, which counts all of them and the stop. Sources:
github.com/aws/sagemaker-python-sdk/issues/4451 (2024-02-24); that AWS bills from the download of the container to the
end of the upload, and not the provisioning: sagemaker-python-sdk/pull/30. Jobs with MaxRuntime 60 s that ended after
350 s are reported, too: github.com/apache/airflow/pull/33982 (2023-08-31).
"""
_MIN_RUNTIME_SECONDS = 60
COSTLY_USD = 1_000.0
"""A run whose estimate is above this is costly: a mistake in it is worth avoiding by a rehearsal."""
_USD_PER_ACCELERATOR_HOUR = 8.0
"""Worth of an accelerator whose price is known in no region, for `CostPlan.is_costly` only: most are newer than an H100.

Source: ml.p5.48xlarge costs 63.296 USD for 8 H100, the most per accelerator in the catalog (us-west-2, 2026-09-01).
"""
_NEVER_COVERED = (
    "volumes, S3, CloudWatch and data transfer",
    f"what AWS bills later than {STOP_SECONDS + OVERRUN_SECONDS} s after the time limit",
)
_NOT_AFTER_PREEMPTION = (
    "further training jobs of a run that its queue preempts: limits.runtime holds for each"
)


@dataclass(frozen=True)
class OverLimit:
    """What the estimate counts beyond the time limit, in seconds that AWS bills.

    Attributes:
        stop: From the stop request to the end of the containers.
        overrun: Start-up, upload and late enforcement; see `OVERRUN_SECONDS`.
        checkpoint_upload: Upload of a last checkpoint of `checkpoint.size`, at the rate that the catalog assumes.
        warm_pool: `cluster.keep_alive`.
    """

    stop: int = 0
    overrun: int = 0
    checkpoint_upload: int = 0
    warm_pool: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return self.stop + self.overrun + self.checkpoint_upload + self.warm_pool


@dataclass(frozen=True)
class CostPlan:
    """Estimate of a run that reaches its time limits, and its limit of the cost; None where the price is unknown.

    Attributes:
        usd_per_hour: On-demand price of the cluster, in US dollars; with preferences, of the most expensive type.
        max_usd: The estimate: `usd_per_hour` x (time limit + `over_limit_seconds`). With spot, the on-demand price for
            all of max_wait, which is more than the real cost.
        price_as_of: Day of the price, as YYYY-MM-DD.
        warm_pool_usd: Part of `max_usd` for the warm pool after the run, if no other job uses it; 0 without keep_alive.
        ceiling_usd: `limits.cost`, within which the estimate is; None without.
        over_limit_seconds: What the estimate counts beyond the time limit.
        not_covered: What neither the estimate nor the limit covers, one phrase each.
        accelerator_hours: Accelerator hours until the time limits that the estimate does not count, because their price
            is unknown or a training plan has paid them; with preferences, of the type with most. 0 where it counts all.
        is_costly: Whether the estimate is above `COSTLY_USD`, or would be with an assumed price for what it does not count.
    """

    usd_per_hour: float | None
    max_usd: float | None
    price_as_of: str | None
    warm_pool_usd: float | None = 0.0
    ceiling_usd: float | None = None
    over_limit_seconds: OverLimit = OverLimit()
    not_covered: tuple[str, ...] = ()
    accelerator_hours: float = 0.0
    is_costly: bool = False


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a run.

    Attributes:
        runtime_seconds: Training time after which the job is stopped.
        wait_seconds: Limit of waiting and training together, with spot; else None.
        over: What the estimate counts beyond them.
    """

    runtime_seconds: int
    wait_seconds: int | None
    over: OverLimit

    @property
    def billed_seconds(self) -> int:
        """Time that the estimate counts: `wait_seconds` with spot, else `runtime_seconds`, and what is beyond it."""
        return (self.wait_seconds or self.runtime_seconds) + self.over.total


@dataclass(frozen=True)
class ClusterPrice:
    """On-demand price of a cluster in USD per hour, and the day of the price as YYYY-MM-DD.

    A cluster whose instances are all of training plans, which are paid in advance, costs 0 and has no day.
    """

    usd_per_hour: float
    as_of: str | None


Unpriced = tuple[str, ...]
"""The instance types of a job whose prices are unknown."""


def price_cluster(spec: JobSpec, region: str, prices: Prices) -> ClusterPrice | Unpriced:
    """Return the price of the cluster, or its types whose price is unknown.

    With preferences it is that of the most expensive choice, because any of them may be taken.
    """
    priced = [choice for choice in spec.cluster.choices if choice.training_plan is None]
    if not priced:
        return ClusterPrice(0.0, None)
    if unpriced := tuple(
        each.instance_type for each in priced if prices.find(each.instance_type, region) is None
    ):
        return unpriced
    known = [
        (price, each)
        for each in priced
        if (price := prices.find(each.instance_type, region)) is not None
    ]
    most_expensive = max(price.usd_per_hour * each.instances for price, each in known)
    return ClusterPrice(most_expensive, min(price.as_of for price, _ in known))


def compute_time_limits(
    spec: JobSpec, price: ClusterPrice | Unpriced, region: str
) -> Step[TimeLimits]:
    """Return the time limits of a run.

    Without `limits.runtime`, the default runtime is shortened so that the estimate stays within `limits.cost`.
    """
    spot = spec.cluster.spot
    runtime = spec.limits.runtime
    if spot is not None and spot.max_wait is not None:
        # Only a default runtime can be longer: JobSpec rejects another.
        runtime = min(runtime, spot.max_wait)
    over = _over_limit(spec)
    limit = spec.limits.cost
    affordable: float = math.inf
    if limit is not None and isinstance(price, tuple):
        message = (
            f"no price is known for {', '.join(price)} in {region}, so limits.cost cannot be kept"
        )
        hint = "cloudtrain prices --refresh, or remove limits.cost and bound limits.runtime"
        yield error(("limits", "cost"), message, hint)
    elif limit is not None and isinstance(price, ClusterPrice) and price.usd_per_hour:
        affordable = max(math.floor(limit / price.usd_per_hour * 3600) - over.total, 0)
        yield from _check_affordable(spec, int(affordable), price.usd_per_hour, over)
    if affordable < runtime:
        yield decision(
            f"runtime: {format_duration(affordable)} instead of {format_duration(runtime)}, "
            f"so that its estimate is at most {limit:g} USD (limits.cost)"
        )
        runtime = max(int(affordable), _MIN_RUNTIME_SECONDS)
    wait = None
    if spot is not None:
        wait = spot.max_wait or int(min(2 * runtime, affordable))
    return TimeLimits(runtime, wait, over)


def _over_limit(spec: JobSpec) -> OverLimit:
    size_bytes = (spec.checkpoint.size or 0) * 10**9
    rate = spec.cluster.instances * min(map(s3_upload_bytes_per_second, spec.cluster.types))
    return OverLimit(
        stop=STOP_SECONDS,
        overrun=OVERRUN_SECONDS,
        checkpoint_upload=math.ceil(size_bytes / rate),
        warm_pool=spec.cluster.keep_alive or 0,
    )


def _check_affordable(
    spec: JobSpec, affordable: int, hourly: float, over: OverLimit
) -> Iterator[Diagnostic]:
    """Reject a `limits.cost` that pays for less than a minute, or for less than the time limits in the job."""
    pays = f"{spec.limits.cost:g} USD pays for {format_duration(affordable)} of {format_usd(hourly)} per hour"
    warm = ""
    if spec.cluster.keep_alive:
        warm = f" and {format_duration(spec.cluster.keep_alive)} of keep_alive"
    beyond = format_duration(over.total - over.warm_pool)
    pays += f", {beyond} of start-up, stop and upload{warm} beyond it"
    spot = spec.cluster.spot
    # A default runtime is shortened instead.
    given = []
    if "runtime" in spec.limits.model_fields_set:
        given.append(("limits.runtime", spec.limits.runtime))
    if spot is not None and spot.max_wait is not None:
        given.append(("cluster.spot.max_wait", spot.max_wait))
    name, longest = max(given, key=lambda item: item[1], default=("", 0))
    needed = math.ceil((longest + over.total) * hourly / 3600)
    if affordable < _MIN_RUNTIME_SECONDS:
        yield error(
            ("limits", "cost"), pays, "raise limits.cost, or take fewer or smaller instances"
        )
    elif affordable < longest:
        hint = f"raise it to {needed} USD, or lower {name} to {affordable // 60}m"
        yield error(("limits", "cost"), f"{pays}; {name} is {format_duration(longest)}", hint)


def estimate_cost(
    spec: JobSpec, price: ClusterPrice | Unpriced, region: str, limits: TimeLimits, prices: Prices
) -> Step[CostPlan]:
    """Return the estimate of a run that reaches its time limits, and its `limits.cost`."""
    uncounted = [
        choice
        for choice in spec.cluster.choices
        if choice.training_plan is not None or prices.find(choice.instance_type, region) is None
    ]
    hours = limits.billed_seconds / 3600
    most = max((_accelerators(choice) for choice in uncounted), default=0)
    worth = max(_worth_per_hour(choice, region, prices) for choice in spec.cluster.choices) * hours
    queue = spec.cluster.queue
    not_covered: tuple[str, ...] = _NEVER_COVERED
    if queue is not None and queue.quota_share is not None:
        not_covered = (*_NEVER_COVERED, _NOT_AFTER_PREEMPTION)
    keep_alive = spec.cluster.keep_alive or 0
    if keep_alive:
        yield from _warn_of_long_keep_alive(keep_alive)
    plan = CostPlan(
        usd_per_hour=None,
        max_usd=None,
        price_as_of=None,
        warm_pool_usd=None if keep_alive else 0.0,
        ceiling_usd=spec.limits.cost,
        over_limit_seconds=limits.over,
        not_covered=not_covered,
        accelerator_hours=round(most * hours, 1),
        is_costly=worth > COSTLY_USD,
    )
    if isinstance(price, tuple):
        yield warning(
            f"no price is known for {', '.join(price)} in {region}: cloudtrain prices --refresh"
        )
        return plan
    if any(choice.training_plan is not None for choice in spec.cluster.choices):
        yield decision(
            "cost: the instances of a training plan are paid in advance, so the estimate counts 0 for them"
        )
    if spec.limits.cost is not None and not price.usd_per_hour:
        yield warning(
            "limits.cost does not limit the instances of a training plan, which are paid in advance: limit their use "
            "by limits.runtime"
        )
    return replace(
        plan,
        usd_per_hour=round(price.usd_per_hour, 4),
        # Rounded up, so that an estimate above the limit never rounds to the limit.
        max_usd=math.ceil(price.usd_per_hour * limits.billed_seconds / 36) / 100,
        price_as_of=price.as_of,
        warm_pool_usd=math.ceil(price.usd_per_hour * keep_alive / 36) / 100,
    )


def _warn_of_long_keep_alive(seconds: int) -> Iterator[Diagnostic]:
    from cloudtrain.planning.warm_pool import MAX_KEEP_ALIVE_SECONDS

    if seconds > MAX_KEEP_ALIVE_SECONDS:
        longest = format_duration(MAX_KEEP_ALIVE_SECONDS)
        yield warning(
            f"cluster.keep_alive: AWS documents at most {longest}; its API accepts {format_duration(seconds)}, "
            "which may be ignored"
        )


def _accelerators(choice: Choice) -> int:
    """Return the accelerators of a choice; a type that is newer than the catalog counts as one, which is the least."""
    instance = find_instance(choice.instance_type)
    if instance is None or instance.gpus is None:
        return choice.instances
    return choice.instances * instance.gpus


def _worth_per_hour(choice: Choice, region: str, prices: Prices) -> float:
    """Return the price of a choice in USD per hour, where it is unknown that of another region or an assumed one."""
    price = prices.usd_per_hour(choice.instance_type, region)
    if price is None:
        price = prices.highest_usd_per_hour(choice.instance_type)
    if price is None:
        return _accelerators(choice) * _USD_PER_ACCELERATOR_HOUR
    return choice.instances * price
