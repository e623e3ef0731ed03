"""What the end of a log shows that no event says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloudtrain.runs.hidden_failure import find_hidden_failure
from cloudtrain.runs.progress import Progress
from cloudtrain.runs.unread_metrics import suggest_patterns


def add_log_end(progress: Progress, lines: Sequence[str]) -> Progress:
    """Return the progress with the error that a log ends with, and with metrics that it has and no pattern reads.

    Args:
        progress: The progress by the events.
        lines: The last lines of one host, in order.
    """
    unread = progress.unread_metrics
    if not progress.metrics and not unread:
        unread = suggest_patterns(lines)
    return replace(progress, hidden_failure=find_hidden_failure(lines), unread_metrics=unread)
