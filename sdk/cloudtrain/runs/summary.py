"""Summaries of a run and of its status, for `repr` and notebooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.runs.status_text import (
    describe_checkpoint,
    describe_cost,
    describe_progress,
    describe_state,
)
from cloudtrain.support.notebook.summary import Row, Summary
from cloudtrain.support.units import format_duration, format_usd

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.spending import Costs
    from cloudtrain.runs.status import Status


def summarize_run(run: Run) -> Summary:
    """Return a summary of a run without calls: its state is in `run.status()`."""
    rows = [("", "attached to this live run of the same request and code")] if run.attached else []
    rows += [("warning", text) for text in run.warnings]
    next_calls: Row = ("next", "run.follow(), run.status(), run.history(), run.logs(), run.stop()")
    return Summary(f"Run {run.reference}", rows, [next_calls])


def summarize_status(status: Status, now: float | None = None) -> Summary:
    """Return a summary of a status. `now` is in seconds since the epoch."""
    return Summary(
        f"Status {status.reference}",
        tuple(_status_rows(status, time.time() if now is None else now)),
    )


def summarize_costs(costs: Costs) -> Summary:
    """Return a summary of costs: the total, and each group."""
    total = costs.total
    rows: list[Row] = [
        ("total", f"{format_usd(total.cost_usd)} for {total.instance_hours:,.1f} instance hours")
    ]
    rows += [("without a price", str(each)) for each in costs.unknown_prices]
    rows.append(("saved by spot", f"{format_usd(total.saved_usd)}"))
    rows.append(("lost", f"{format_usd(total.interrupted_usd + total.failed_usd)}"))
    rows += [
        (group.name or "(none)", f"{format_usd(group.cost_usd)}, {group.runs} runs")
        for group in costs.groups
    ]
    return Summary(f"Costs of {total.runs} runs by {costs.by}", rows)


def _status_rows(status: Status, now: float) -> Iterator[Row]:
    yield "state", describe_state(status)
    for text in status.alarms(now):
        yield "alarm", text
    if progress := describe_progress(status, now):
        yield "progress", progress
    if metrics := ", ".join(shown_metrics(status.progress.metrics)):
        yield "metrics", metrics
    if checkpoint := describe_checkpoint(status, now):
        yield "checkpoint", checkpoint
    if status.started is not None:
        ended = now if status.ended is None else status.ended.timestamp()
        took = format_duration(ended - status.started.timestamp())
        yield (
            "started",
            f"{status.started:%Y-%m-%d %H:%M:%S %Z}, {took}{' so far' if status.ended is None else ''}",
        )
    if cost := describe_cost(status, status.cost_usd):
        yield "cost", cost
    for text in (*status.warnings(), *status.host_warnings()):
        yield "warning", text
