"""Rows about a run's warm pool: the cluster that is kept for the next job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.console import command_name

if TYPE_CHECKING:
    from cloudtrain.runs.status import Status


def pool_rows(status: Status) -> list[tuple[str, str]]:
    """Return the rows of a status about its warm pool; none when the run has no warm pool."""
    from cloudtrain.planning.warm_pool import clock_time
    from cloudtrain.support.units import format_duration

    pool = status.warm_pool
    if pool is None:
        return []
    kept = format_duration(pool.kept_seconds)
    paid = f"{kept}, {pool.usd:,.2f} USD" if pool.usd is not None else kept
    if pool.is_available:
        until = f" until {clock_time(pool.until)}" if pool.until is not None else ""
        price = f" at {status.usd_per_hour:,.2f} USD per hour" if status.usd_per_hour is not None else ""
        text = f"kept{until}{price} ({paid} so far)"
        return [("warm pool", text), ("", f"end it: {command_name()} stop {status.reference} --pool")]
    if pool.reused_by:
        return [("warm pool", f"taken over by {pool.reused_by} after {paid}")]
    if pool.status == "InUse":
        after = f"kept for {format_duration(pool.keep_alive_seconds)} after the end" if pool.keep_alive_seconds else ""
        return [("warm pool", after or "in use, and not kept after the end")]
    return [("warm pool", f"ended after {paid}" if pool.kept_seconds else "ended, or was not kept")]
