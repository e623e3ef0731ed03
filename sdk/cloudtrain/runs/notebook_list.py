"""A list of runs, which a notebook shows as a table."""

from __future__ import annotations

from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.runs.status import Status, describe_cost
from cloudtrain.support.notebook.summary import Row, Summary, count

MOST_ROWS = 100
"""Runs in the table of a notebook; the list has all of them."""


class RunList(list[Status]):
    """Runs, newest first: a list of `Status`, with a table for notebooks."""

    def _repr_html_(self) -> str:
        rows = [_row(status) for status in self[:MOST_ROWS]]
        if len(self) > MOST_ROWS:
            rows.append(("...", f"{count(len(self) - MOST_ROWS, 'older run')}"))
        return Summary(count(len(self), "run"), rows).to_html()


def _row(status: Status) -> Row:
    submitted = "" if status.created is None else f"submitted {status.created:%Y-%m-%d %H:%M %Z}"
    cost = describe_cost(status, status.cost_usd)
    parts = (str(status.state), submitted, ", ".join(shown_metrics(status.progress.metrics)), cost)
    return status.reference, ", ".join(filter(None, parts))
