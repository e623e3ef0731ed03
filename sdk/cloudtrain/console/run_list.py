"""Output of `list`: one run per line, in columns that fit the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.console import print_columns
from cloudtrain.console.status_fields import as_one_line, describe_metric, describe_steps
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.status import State
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.runs.status import Status

_HEADER = ("run", "state", "submitted (UTC)", "took", "on", "metric", "")
_LEFT_OUT_FIRST = ("on", "took", "submitted (UTC)", "metric", "")
_LEAST_TEXT = 16
_GAP = 2
_COLOURS: Mapping[str, str] = {
    State.SUCCEEDED: "32",
    State.FAILED: "1;31",
    State.STOPPED: "33",
    State.STOPPING: "33",
    State.INTERRUPTED: "33",
    State.UNKNOWN: "33",
    State.RUNNING: "36",
    State.STARTING: "36",
}


def print_runs(runs: Sequence[Status], *, is_filtered: bool) -> None:
    """Print runs in columns; empty columns are left out. On a terminal, columns are left out and texts cut to fit."""
    if not runs:
        print("no run matches" if is_filtered else "no runs here yet; start one with: cloudtrain submit JOB --local")
        return
    now = datetime.now(UTC)
    rows = [_HEADER, *(_row(status, now) for status in runs)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = rows if width is None else fit_columns(rows, width, _LEFT_OUT_FIRST)
    print_columns(shown, skip_empty=True, colours=_COLOURS)


def fit_columns(rows: Sequence[Sequence[str]], width: int, left_out_first: Sequence[str]) -> list[tuple[str, ...]]:
    """Return rows of cells without the columns for which a line of this width has no room.

    A last column without a name is text, which is cut to the rest of the line.

    Args:
        rows: The rows; the first is the header.
        width: Characters of a line.
        left_out_first: The names of the columns that can be left out, in this order.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    for name in left_out_first:
        if _room(columns, width) >= (0 if columns[-1][0] else _LEAST_TEXT):
            break
        columns = [column for column in columns if column[0] != name]
    if not columns[-1][0]:
        room = _room(columns, width)
        columns[-1] = tuple(text if len(text) <= room else f"{text[: room - 1]}…" for text in columns[-1])
    return list(zip(*columns, strict=True))


def _room(columns: Sequence[Sequence[str]], width: int) -> int:
    """Return the characters of a line that the columns leave for the last one, if that is text."""
    fixed = [max(map(len, column)) for column in columns if column[0]]
    return width - sum(fixed) - _GAP * (len(columns) - 1)


def _row(status: Status, now: datetime) -> tuple[str, ...]:
    count, name = status.instances, status.instance_type
    # A kept warm pool costs money after the run has ended.
    pool = "warm pool kept" if status.warm_pool is not None and status.warm_pool.is_available else ""
    metrics = status.progress.metrics
    metric = main_metric(metrics)
    return (
        status.reference,
        str(status.state),
        f"{status.created.astimezone(UTC):%Y-%m-%d %H:%M}" if status.created else "",
        _duration(status, now),
        (f"{count} x {name}" if count else name) if name else "",
        "" if metric is None else as_one_line(f"{metric} {describe_metric(metrics[metric])}"),
        as_one_line("; ".join(filter(None, (_summary(status), pool)))),
    )


def _duration(status: Status, now: datetime) -> str:
    """Return the run's duration so far: from its start, else from its submit."""
    started = status.started or status.created
    ended = status.ended or (None if status.state.is_final else now)
    return "" if started is None or ended is None else format_duration(max(0.0, (ended - started).total_seconds()))


def _summary(status: Status) -> str:
    """Return the run's progress and the time left, or the reason of its state."""
    if status.reason and (status.is_ending or status.progress.last_step is None):
        return status.reason.strip().split("\n")[0]
    left = status.seconds_left()
    parts = [describe_steps(status), "" if left is None else f"{format_duration(left)} left"]
    return "  ".join(part for part in parts if part)
