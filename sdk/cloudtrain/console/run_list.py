"""Table of runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.console import command_name, print_message
from cloudtrain.console.status_fields import as_one_line

if TYPE_CHECKING:
    from cloudtrain.runs.status import Status

_HEADER = ("run", "state", "submitted (UTC)", "took", "on", "")


def print_runs(runs: Sequence[Status], *, is_filtered: bool) -> None:
    """Print runs in columns; empty columns are left out."""
    if not runs:
        print("no run matches" if is_filtered else "no runs here yet; start one with: cloudtrain submit JOB --local")
        return
    now = datetime.now(UTC)
    rows = [_HEADER, *(_row(status, now) for status in runs)]
    shown = [index for index in range(len(_HEADER)) if any(row[index] for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in shown}
    # Long lines are cut on a terminal; a file or pipe gets them in full.
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        print("  ".join(f"{row[index]:<{widths[index]}}" for index in shown).rstrip()[:most])


def print_more(arguments: str) -> None:
    """Print the command that lists more runs to standard error."""
    print_message(f"more: {command_name()} list {arguments}")


def _row(status: Status, now: datetime) -> tuple[str, ...]:
    count, name = status.instances, status.instance_type
    return (
        status.reference,
        str(status.state),
        f"{status.created.astimezone(UTC):%Y-%m-%d %H:%M}" if status.created else "",
        _duration(status, now),
        (f"{count} x {name}" if count else name) if name else "",
        as_one_line("; ".join(filter(None, (_summary(status), _pool(status))))),
    )


def _duration(status: Status, now: datetime) -> str:
    """Return the run's duration so far: from its start, else from its submit."""
    from cloudtrain.support.units import format_duration

    started = status.started or status.created
    ended = status.ended or (None if status.state.is_final else now)
    return "" if started is None or ended is None else format_duration(max(0.0, (ended - started).total_seconds()))


def _pool(status: Status) -> str:
    """Return a note when a warm pool is kept, and costs money, after the run has ended."""
    return "warm pool kept" if status.warm_pool is not None and status.warm_pool.is_available else ""


def _summary(status: Status) -> str:
    """Return the run's progress and the time left, or the reason of its state."""
    from cloudtrain.console.status_fields import describe_metric, describe_steps
    from cloudtrain.support.units import format_duration

    progress = status.progress
    if status.reason and (status.is_ending or progress.last_step is None):
        return status.reason.strip().split("\n")[0]
    left = status.seconds_left()
    metric = next((name for name in ("test/accuracy", "test/loss", "train/loss") if name in progress.metrics), None)
    parts = [
        describe_steps(status),
        "" if left is None else f"{format_duration(left)} left",
        f"{metric} {describe_metric(progress.metrics[metric])}" if metric else "",
    ]
    return "  ".join(part for part in parts if part)
