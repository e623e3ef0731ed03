"""Live progress of a run in a notebook or in lines: `Run.follow`."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from cloudtrain.aws.retry import Backoff, OutageTolerance, poll
from cloudtrain.errors import EXIT_RUN_FAILED
from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.runs.status import Status, describe_progress, shown_reason, summarize_status
from cloudtrain.support.notebook.live_output import LiveTable, is_notebook, write_line
from cloudtrain.support.notebook.summary import Row, printable

LEAST_POLL_SECONDS = 0.5
"""Shortest wait between two polls of a run that a user watches."""

_LINE_SECONDS = 10.0
_BAR_CHARACTERS = 20


class Followed(Protocol):
    """A run, as far as it is followed: `Run`."""

    @property
    def reference(self) -> str:
        """`<backend>:<run id>`."""
        ...

    def status(self) -> Status:
        """Return the present status."""
        ...

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status."""
        ...


def follow_run(run: Followed) -> None:
    """Show a run until it has ended.

    Raises:
        KeyboardInterrupt: the user has interrupted it. The run continues.
        CloudError: AWS refused or could not be reached at first or for an hour. The run continues.
    """
    view: _TableView | _LineView = _TableView() if is_notebook() else _LineView()
    try:
        for status in poll(
            run.status,
            run.poll_backoff(),
            OutageTolerance(view.note),
            changing=shown_part,
            least_seconds=LEAST_POLL_SECONDS,
        ):
            view.show(status)
            if status.state.is_final:
                return
    except KeyboardInterrupt:
        view.note(
            f'interrupted; the run continues. To follow it again: cloudtrain.get_run("{run.reference}").follow()'
        )
        raise


def shown_part(status: Status) -> tuple[object, ...]:
    """Return what of a status decides how soon it is polled again: time and cost change at each poll."""
    return status.state, status.reason, status.progress


class _TableView:
    """The status as a table that is updated in place."""

    def __init__(self) -> None:
        self._table = LiveTable()
        self._status: Status | None = None
        self._notes: list[Row] = []

    def show(self, status: Status) -> None:
        """Show a status."""
        self._status = status
        now = time.time()
        summary = summarize_status(status, now)
        rows = [
            (name, f"{_bar(status)}{value}" if name == "progress" else value)
            for name, value in summary.rows
        ]
        if status.exit_code == EXIT_RUN_FAILED:
            rows.append(("why", f'cloudtrain.explain("{status.reference}")'))
        self._table.show(
            dataclasses.replace(summary, title=status.reference, rows=(*rows, *self._notes))
        )

    def note(self, text: str) -> None:
        """Show a message below the status."""
        self._notes = [("note", text)]
        if self._status is not None:
            self.show(self._status)
        else:
            write_line(printable(text))


class _LineView:
    """Lines for changes of the state, and for progress at intervals."""

    def __init__(self) -> None:
        self._last: tuple[str, str, bool] | None = None
        self._line_time = 0.0

    def show(self, status: Status) -> None:
        """Write a line if the state has changed, or if it is time for the next line about progress."""
        if status.state.is_final:
            write_line(summarize_status(status).to_text())
            return
        now = time.monotonic()
        has_steps = status.progress.last_step is not None
        shown = (status.state, status.reason, has_steps)
        if shown == self._last and (now - self._line_time < _LINE_SECONDS or not has_steps):
            return
        self._last = shown
        self._line_time = now
        parts = [str(status.state)]
        if has_steps:
            parts += [
                describe_progress(status, time.time()),
                ", ".join(shown_metrics(status.progress.metrics)),
            ]
        else:
            parts.append(shown_reason(status))
        write_line(printable("  ".join(filter(None, parts))))

    def note(self, text: str) -> None:
        """Write a message."""
        write_line(printable(text))


def _bar(status: Status) -> str:
    """Return a bar of the completed steps, or an empty string while the total is unknown."""
    done = status.progress.last_step
    total = status.progress.total_steps
    if not total or done is None:
        return ""
    share = min(1.0, done / total)
    filled = round(_BAR_CHARACTERS * share)
    return f"{'━' * filled}{'─' * (_BAR_CHARACTERS - filled)} {share:.0%}  "
