"""Summary of an explanation, for `repr` and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.support.notebook.summary import Row, Summary, count

if TYPE_CHECKING:
    from cloudtrain.failure_rules.explanation import Explanation


def summarize_explanation(found: Explanation) -> Summary:
    """Return a summary of an explanation; the HTML table has the traceback or the last lines, too."""
    lines = found.traceback or found.last_lines
    name = "traceback" if found.traceback else "last lines"
    details = [("" if index else name, line) for index, line in enumerate(lines)]
    return Summary(f"Explanation of {found.run}: {found.state}", tuple(_rows(found)), details)


def _rows(found: Explanation) -> Iterator[Row]:
    if found.failure is not None:
        yield "why", found.failure.words
    yield "message", found.message
    if found.where:
        yield "where", found.where
    if len(found.ranks) > 1 and not found.is_of_all_ranks:
        yield "reported by", count(len(found.ranks), "rank")
    if found.action:
        yield "action", found.action
