"""Output of evaluations and of their ranking."""

from __future__ import annotations

from collections.abc import Sequence

from cloudtrain.console import print_message, print_text
from cloudtrain.console.facts import print_sentence
from cloudtrain.console.tables import Cell, Column, print_table, run_cell
from cloudtrain.runs.evaluations import Evaluation, Ranking
from cloudtrain.runs.shown_metrics import describe_metric

_WORST = 3


def print_evaluation(found: Evaluation) -> None:
    """Print the metrics of an evaluation with their intervals, and the main figures of its analyses."""
    at = "" if found.step is None else f", weights of step {found.step:,}"
    at = ", weights that it started with" if found.is_initial else at
    print_text(f"evaluation of {found.evaluated}{at}")
    rows = [
        (f"{split}/{name}", str(each), f"{part.samples:,}")
        for split, part in found.splits.items()
        for name, each in part.metrics.items()
    ]
    columns = (
        Column("metric", least=24),
        Column("value (95 % interval)"),
        Column("samples", is_number=True),
    )
    print_table(columns, rows)
    for split, part in found.splits.items():
        pairs = (part.analyses.get("classification") or {}).get("most_confused") or []
        for pair in pairs[:_WORST]:
            print_text(f"{split}: {pair['true']} taken for {pair['predicted']}: {pair['count']}")
        if calibration := part.analyses.get("calibration"):
            print_text(f"{split}: expected calibration error {calibration['expected_error']:.4f}")
        if residuals := part.analyses.get("residuals"):
            mean, size = (describe_metric(residuals[name]) for name in ("mean", "mean_absolute"))
            print_text(f"{split}: mean residual {mean}, mean absolute {size}")
        for name, value in (part.analyses.get("own") or {}).items():
            print_text(f"{split}: {name}: {value}")


def print_ranking(ranking: Ranking) -> None:
    """Print evaluations in one table, the best first."""
    metric = ranking.metric
    split = (metric or "").partition("/")[0]
    names = list(dict.fromkeys(name for each in ranking.evaluations for name in each.metrics))
    shown = [metric] if metric is not None else []
    shown += [
        name for name in names if name != metric and (not split or name.startswith(f"{split}/"))
    ]
    rows: list[Sequence[str | Cell]] = []
    for place, each in enumerate(ranking.evaluations, 1):
        values = [str(each.metrics[name]) if name in each.metrics else "" for name in shown]
        place_text = str(place) if metric else ""
        rows.append((place_text, run_cell(each.evaluated), _weights_of(each), *values))
    columns = [
        Column("", is_number=True, keep="pipe"),
        Column("run"),
        Column("step", is_number=True, keep="pipe"),
        *(
            Column(name, title=name, drop=len(shown) - index if index else 0)
            for index, name in enumerate(shown)
        ),
    ]
    left_out = print_table(columns, rows)
    if left_out:
        print_sentence(f"without {', '.join(left_out)}; all: --json", print_message)
    for text in ranking.warnings:
        print_sentence(f"warning: {text}", print_message)


def _weights_of(found: Evaluation) -> str:
    """Return which weights were evaluated: the step, `initial`, or an empty text for the final ones."""
    if found.is_initial:
        return "initial"
    return "" if found.step is None else f"{found.step:,}"
