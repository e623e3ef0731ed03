"""Summary of a plan, for `repr` and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.job.arguments import command_line
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_duration, format_size

if TYPE_CHECKING:
    from cloudtrain.planning.plan import Plan


def summarize_plan(plan: Plan) -> Summary:
    """Return a summary of a plan; the HTML table has all its warnings and its decisions, too."""
    details = [("warning", text) for text in plan.warnings[1:]] + [
        ("decision", text) for text in plan.decisions
    ]
    return Summary(f"Plan {plan.run}", tuple(_rows(plan)), details)


def _rows(plan: Plan) -> Iterator[Row]:
    cluster, length, cost = plan.cluster, plan.length, plan.cost
    yield "command", command_line(plan.config)
    where = "on this machine" if plan.target == "local" else f"of {cluster.instance_type}"
    ranks = (
        count(cluster.world_size, "rank")
        if cluster.world_size
        else "ranks unknown before the start"
    )
    yield (
        "cluster",
        f"{count(cluster.instances, 'instance')} {where}, {ranks}, {cluster.distribution}",
    )
    if plan.batch is not None and plan.batch.global_:
        yield "batch", f"{count(plan.batch.global_, 'sample')} per step"
    if length.steps is not None:
        yield "length", count(length.steps, "step")
    elif length.epochs is not None:
        yield "length", count(length.epochs, "epoch")
    yield "code", f"{count(plan.bundle.files, 'file')}, {format_size(plan.bundle.bytes)}"
    yield "checkpoints", plan.locations.checkpoints
    yield "time limit", format_duration(plan.max_runtime_seconds)
    if plan.target != "local":
        yield "cost", _cost(cost.usd_per_hour, cost.max_usd)
    if plan.warnings:
        more = (
            f" (and {len(plan.warnings) - 1} more in plan.warnings)"
            if len(plan.warnings) > 1
            else ""
        )
        yield "warning", f"{plan.warnings[0]}{more}"


def _cost(usd_per_hour: float | None, max_usd: float | None) -> str:
    if usd_per_hour is None or max_usd is None:
        return "unknown price"
    return f"{usd_per_hour:,.2f} USD per hour, estimate {max_usd:,.2f} USD at the time limit"
