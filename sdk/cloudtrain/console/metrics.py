"""Tables of metrics: the history of one run, and the comparison of several."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.console import print_columns, print_message
from cloudtrain.console.runs import fit_columns
from cloudtrain.runs.shown_metrics import describe_metric
from cloudtrain.runs.event_words import describe_unmatched

if TYPE_CHECKING:
    from cloudtrain.runs.comparison import ComparedMetric, Comparison
    from cloudtrain.runs.history import MetricHistory


_OTHER_LINES = 4
"""Lines of a screen besides the rows: the header, the note, and the prompt before and after the command."""


def print_history(history: MetricHistory, *, show_all: bool, unmatched: Sequence[str] = ()) -> None:
    """Print a history as a table; on a terminal as many steps and metrics as fit, unless `show_all`.

    Without values, the metrics whose patterns are `unmatched` are named.
    """
    names = list(history.metrics)
    rows = history.rows()
    if not rows:
        print_message("the run has reported no metrics")
        if unmatched:
            print_message(f"  {describe_unmatched(unmatched)}")
            return
        print_message(
            "  a script reports them with cloudtrain_runtime.report(step, loss=...), or job.yaml finds them in"
        )
        print_message("  its output: metrics: {loss: 'loss=([0-9.]+)'}")
        return
    is_cut = sys.stdout.isatty() and not show_all
    size = shutil.get_terminal_size()
    shown: Sequence[Mapping[str, Any]] = rows
    if is_cut:
        shown = thin_rows(rows, max(2, size.lines - _OTHER_LINES))
    cells: Sequence[Sequence[str]] = _cells(names, shown)
    if is_cut:
        cells = fit_columns(cells, size.columns, names[:0:-1])
    print_columns(cells)
    notes = []
    if len(shown) < len(rows):
        notes.append(f"{len(shown):,} of {len(rows):,} steps")
    if left := [name for name in names if name not in cells[0]]:
        notes.append(f"without {', '.join(left)}")
    if notes:
        print_message(f"{', '.join(notes)}; all: --all")


def thin_rows(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return at most `most` rows, the first and the last among them, from all parts of the history.

    Of neighbours the one with the rarest metrics stays, so that evaluations are not lost among training steps.
    """
    if len(rows) <= most:
        return list(rows)
    counts = Counter(name for row in rows for name in row)
    inner = rows[1:-1]
    parts = most - 2
    bounds = [len(inner) * part // max(1, parts) for part in range(parts + 1)]
    groups = [inner[first:end] for first, end in itertools.pairwise(bounds)]

    def rarity(row: Mapping[str, Any]) -> float:
        return sum(1 / counts[name] for name in row)

    return [rows[0], *(max(group, key=rarity) for group in groups), rows[-1]]


def _cells(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    header = ["step", *names]
    return [header, *([f"{row['step']:,}", *(_value(row, name) for name in names)] for row in rows)]


def _value(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    if row[name] is None:
        return "not finite"
    return f"{row[name]:.6g}"


_BEST = "32"


def print_comparison(found: Comparison) -> None:
    """Print a comparison; the best value of a metric is green and marked with `*`."""
    header = ["", *(reference.partition(":")[2] for reference in found.runs)]
    settings = [[each.path, *(_text(value) for value in each.values)] for each in found.settings]
    metrics = [[each.metric, *_values(each)] for each in found.metrics]
    best = {cell: _BEST for row in metrics for cell in row if cell.endswith("*")}
    print_columns([header, *settings, *metrics], colours=best)
    if not settings:
        print_message("no setting differs")
    if metrics:
        print_message("metrics: the best value of the run; * is the best of all")


def _values(metric: ComparedMetric) -> list[str]:
    cells = ["" if value is None else describe_metric(value) for value in metric.best]
    if metric.winner is not None:
        cells[metric.winner] += "*"
    return cells


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    if len(text) <= 40:  # noqa: PLR2004 (a digest's beginning identifies it)
        return text
    return f"{text[:12]}…"
