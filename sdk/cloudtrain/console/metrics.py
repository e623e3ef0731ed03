"""Tables of metrics: the history of one run, and the comparison of several."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.console import print_message
from cloudtrain.console.cells import cell_count, cut_text
from cloudtrain.console.facts import print_sentence
from cloudtrain.console.tables import GAP, Cell, Column, print_table, run_cell
from cloudtrain.console.terminal import is_terminal, terminal_width
from cloudtrain.runs.event_words import describe_unmatched
from cloudtrain.runs.main_metric import TRAINING_LOSS
from cloudtrain.runs.shown_metrics import describe_metric
from cloudtrain.support.notebook.summary import printable
from cloudtrain.support.units import format_plain_number

if TYPE_CHECKING:
    from cloudtrain.runs.comparison import ComparedMetric, ComparedSetting, Comparison
    from cloudtrain.runs.history import MetricHistory


_LEAST = 10
"""Cells of a column whose header is cut; numbers of four digits are not longer."""
_LEARNING_RATE = "train/learning_rate"
"""It often is the same in each row, and known from the job."""
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
    is_cut = is_terminal() and not show_all
    shown: Sequence[Mapping[str, Any]] = rows
    if is_cut:
        # Its import takes 5 ms.
        import shutil

        shown = thin_rows(rows, max(2, shutil.get_terminal_size().lines - _OTHER_LINES))
        names.sort(key=_importance)
    # The last metrics go first; the first one stays.
    drops = [len(names) - place if is_cut and place else 0 for place in range(len(names))]
    columns = [
        Column("step", is_number=True),
        *(
            Column(name, title=name, is_number=True, drop=drop, least=0 if drop else _LEAST)
            for name, drop in zip(names, drops, strict=True)
        ),
    ]
    left = print_table(columns, _cells(names, shown))
    notes = []
    if len(shown) < len(rows):
        notes.append(f"{len(shown):,} of {len(rows):,} steps")
    if left:
        notes.append(f"without {', '.join(left)}")
    if notes:
        print_sentence(f"{', '.join(notes)}; all: --all", print_message)


def _importance(name: str) -> int:
    """Return the place of a metric on a terminal: the training loss, evaluations, other metrics, the learning rate."""
    if name == TRAINING_LOSS:
        return 0
    if not name.startswith("train/"):
        return 1
    return 3 if name == _LEARNING_RATE else 2


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


def _cells(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[list[str | Cell]]:
    return [[f"{row['step']:,}", *(_value(row, name) for name in names)] for row in rows]


def _value(row: Mapping[str, Any], name: str) -> str | Cell:
    if name not in row:
        return ""
    if row[name] is None:
        return "not finite"
    return Cell(format_plain_number(row[name]), shown=describe_metric(row[name]))


_BEST = "32"
_LONGEST_VALUE = 20
_LEAST_NAME = 24
_LEAST_TITLE = 15


def print_comparison(found: Comparison) -> None:
    """Print a comparison; the best value of a metric is green and marked with `*`.

    Each run is a column. On a terminal without room for all of them, each run is a row.
    """
    names = [each.path for each in found.settings] + [each.metric for each in found.metrics]
    values = [_setting_cells(each) for each in found.settings]
    values += [_metric_cells(each) for each in found.metrics]
    width = terminal_width()
    if width is None or _side_by_side(found.runs, names, values) <= width:
        runs = [
            Column(
                run.partition(":")[2],
                title=run_cell(run).shown,
                is_number=True,
                least=_LEAST,
                keep="both",
            )
            for run in found.runs
        ]
        rows: list[list[str | Cell]] = [
            [name, *cells] for name, cells in zip(names, values, strict=True)
        ]
        print_table([Column("", least=_LEAST_NAME, keep="pipe"), *runs], rows)
    else:
        _print_runs_as_rows(found, names, values)
    if not found.settings:
        print_message("no setting differs")
    if found.metrics:
        print_message("metrics: the best value of the run; * is the best of all")
    if found.note:
        print_sentence(found.note, print_message)


def _side_by_side(
    runs: Sequence[str], names: Sequence[str], values: Sequence[Sequence[Cell]]
) -> int:
    """Return the cells that a line with a column for each run needs at least."""
    heads = [cell_count(run_cell(run).shown or "") for run in runs]
    widest = [0] * len(runs)
    if values:
        columns = zip(*values, strict=True)
        widest = [max(cell_count(cell.shown or cell.text) for cell in column) for column in columns]
    total = min(_LEAST_NAME, max(map(cell_count, names), default=0))
    return total + sum(GAP + min(_LEAST, max(pair)) for pair in zip(heads, widest, strict=True))


def _print_runs_as_rows(
    found: Comparison, names: Sequence[str], values: Sequence[Sequence[Cell]]
) -> None:
    """Print a row for each run; metrics come first, and what a line has no room for is named below."""
    settings = len(found.settings)
    order = [*range(settings, len(names)), *range(settings)]
    columns = [
        Column(
            names[index],
            title=_short(names[index]),
            is_number=True,
            drop=len(order) - place if place else 0,
            least=_LEAST_TITLE,
        )
        for place, index in enumerate(order)
    ]
    rows: list[list[str | Cell]] = [
        [run_cell(run), *(values[index][place] for index in order)]
        for place, run in enumerate(found.runs)
    ]
    left_out = print_table([Column("run", title="ID"), *columns], rows)
    if left_out:
        print_sentence(f"without {', '.join(left_out)}; all: --json", print_message)


def _short(name: str) -> str:
    """Return the last part of a setting's path; a metric has none."""
    return name.rpartition(".")[2]


def _setting_cells(setting: ComparedSetting) -> list[Cell]:
    return [_setting_cell(value) for value in setting.values]


def _setting_cell(value: Any) -> Cell:
    text = "" if value is None else printable(str(value), _MOST_CHARACTERS)
    shown = describe_metric(value) if isinstance(value, float) else cut_text(text, _LONGEST_VALUE)
    return Cell(text, shown=shown)


_MOST_CHARACTERS = 2000


def _metric_cells(metric: ComparedMetric) -> list[Cell]:
    # The space keeps the digits of a column below each other.
    mark = "" if metric.winner is None else " "
    return [
        _metric_cell(value, "*", _BEST) if place == metric.winner else _metric_cell(value, mark)
        for place, value in enumerate(metric.best)
    ]


def _metric_cell(value: float | None, mark: str, colour: str = "") -> Cell:
    if value is None:
        return Cell("")
    text = f"{format_plain_number(value)}{mark}".rstrip()
    return Cell(text, shown=f"{describe_metric(value)}{mark}", colour=colour)
