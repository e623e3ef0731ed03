"""What a notebook shows of a run: its state, the curve of its key metric, and links."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from cloudtrain.errors import CloudtrainError
from cloudtrain.runs.history import read_history
from cloudtrain.runs.log_lines import LogSource
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.status import Status, summarize_status
from cloudtrain.runs.titles import describe_metric_value, metric_title
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.notebook.summary import Row, Summary
from cloudtrain.support.web_links import web_link

_WIDTH: Final = 320
_HEIGHT: Final = 64
_MARGIN: Final = 2
_MOST_POINTS: Final = 320
"""More points than pixels show nothing new."""


def run_html(source: LogSource, ask: Callable[[], Status], known: Summary) -> str:
    """Return a run as HTML. It asks for the status; where that fails, it shows what is known without.

    The curve is read from the log of runs without an account only: a log in an account costs calls.

    Args:
        source: The run's log.
        ask: Returns its status.
        known: What is known without a call.
    """
    try:
        status = ask()
        curve = "" if facts_of(status.backend).uses_account else _curve(source, status)
    except CloudtrainError as error:
        return replace(known, rows=(*known.rows, ("state", f"not known: {error}"))).to_html()
    shown = summarize_status(status)
    rows = (*known.rows, *shown.rows)
    return Summary(known.title, rows, _next(status)).to_html() + _links(status) + curve


def _next(status: Status) -> Sequence[Row]:
    """Return what to type next."""
    if status.state.is_final:
        calls = "run.history(), run.plot(), run.logs(), run.download(), cloudtrain.explain(run)"
    else:
        calls = "run.follow(), run.status(), run.logs(), run.stop()"
    return (("next", calls), ("page", f"cloudtrain dashboard, then {status.reference}"))


def _links(status: Status) -> str:
    """Return links to the pages of trackers, such as MLflow."""
    links = [(name, web_link(place)) for name, place in status.progress.tracked.items()]
    texts = [
        f'<a href="{html.escape(link)}" target="_blank" rel="noopener">{html.escape(name)}</a>'
        for name, link in links
        if link
    ]
    return f"<p>{', '.join(texts)}</p>" if texts else ""


def _curve(source: LogSource, status: Status) -> str:
    name = main_metric(status.progress.metrics)
    if name is None:
        return ""
    found = read_history(source).metrics.get(name, ())
    points = [(each.step, each.value) for each in found if each.value is not None]
    if len({step for step, _ in points}) <= 1:
        return ""
    points = points[:: -(-len(points) // _MOST_POINTS)]
    label = f"{metric_title(name)}: {describe_metric_value(name, points[-1][1])} at step {points[-1][0]:,}"
    return (
        f'<figure style="margin:0.4em 0;color:inherit"><svg role="img" aria-label="{html.escape(label)}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<path d="{_path(points)}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
        f'<figcaption style="opacity:0.7;font-size:0.9em">{html.escape(label)}</figcaption></figure>'
    )


def _path(points: Sequence[tuple[int, float]]) -> str:
    """Return the path of a curve, from the least to the largest value."""
    first, last = points[0][0], points[-1][0]
    least, most = min(value for _, value in points), max(value for _, value in points)
    width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    scale = height / (most - least) if most > least else 0.0
    places = (
        (
            _MARGIN + width * (step - first) / (last - first),
            _HEIGHT - _MARGIN - (value - least) * scale,
        )
        for step, value in points
    )
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
