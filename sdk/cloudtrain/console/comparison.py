"""Output of `compare`: the settings that differ and the metrics, a column per run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloudtrain.console import print_columns, print_message
from cloudtrain.console.status_fields import describe_metric

if TYPE_CHECKING:
    from cloudtrain.runs.comparison import ComparedMetric, Comparison

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
    return [cell + ("*" if index == metric.winner else "") for index, cell in enumerate(cells)]


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"  # noqa: PLR2004 (a digest's beginning identifies it)
