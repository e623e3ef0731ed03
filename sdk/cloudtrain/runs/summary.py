"""Summaries of a run and of its status, for `repr` and notebooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.support.notebook.summary import Row, Summary
from cloudtrain.support.units import format_duration

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
        ("total", f"{total.cost_usd:,.2f} USD for {total.instance_hours:,.1f} instance hours")
    ]
    rows += [("without a price", str(each)) for each in costs.unknown_prices]
    rows.append(("saved by spot", f"{total.saved_usd:,.2f} USD"))
    rows.append(("lost", f"{total.interrupted_usd + total.failed_usd:,.2f} USD"))
    rows += [
        (group.name or "(none)", f"{group.cost_usd:,.2f} USD, {group.runs} runs")
        for group in costs.groups
    ]
    return Summary(f"Costs of {total.runs} runs by {costs.by}", rows)


def _status_rows(status: Status, now: float) -> Iterator[Row]:
    progress = status.progress
    reason = status.reason.strip().partition("\n")[0]
    is_ordinary = progress.last_step is not None and not status.is_ending
    yield "state", str(status.state) + (f": {reason}" if reason and not is_ordinary else "")
    for text in status.alarms(now):
        yield "alarm", text
    if progress.last_step is not None:
        yield "progress", describe_progress(status, now)
    if metrics := ", ".join(shown_metrics(status.progress.metrics)):
        yield "metrics", metrics
    age = status.checkpoint_age(now)
    if progress.checkpoint is not None and age is not None:
        when = "before the end" if status.ended is not None else "ago"
        yield "checkpoint", f"step {progress.checkpoint.step:,}, {format_duration(age)} {when}"
    if status.started is not None:
        ended = now if status.ended is None else status.ended.timestamp()
        took = format_duration(max(0.0, ended - status.started.timestamp()))
        yield (
            "started",
            f"{status.started:%Y-%m-%d %H:%M:%S %Z}, {took}{' so far' if status.ended is None else ''}",
        )
    if status.cost_usd:
        at_most = "at most " if status.is_spot and not status.state.is_final else ""
        yield "cost", f"{at_most}{status.cost_usd:,.2f} USD"
    for text in (*status.warnings(), *status.host_warnings()):
        yield "warning", text


def describe_progress(status: Status, now: float) -> str:
    """Return the completed steps and the time left: `610/1,000 steps, 12m left`."""
    progress = status.progress
    total = f"/{progress.total_steps:,}" if progress.total_steps else ""
    steps = f"{progress.last_step or 0:,}{total} steps"
    return ", ".join(filter(None, (steps, status.describe_rest(now))))
