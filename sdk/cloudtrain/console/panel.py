"""The panel below a followed run's log, computed at each draw so that its times advance between polls.

Only code that draws on a terminal imports this module, because it imports rich.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from cloudtrain.console.status_fields import (
    alarm_rows,
    as_one_line,
    checkpoint_row,
    device_row,
    limit_row,
    metrics_row,
    progress_row,
    spent_row,
    state_rows,
    step_row,
    warning_rows,
)
from cloudtrain.support.notebook.summary import Row
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from cloudtrain.runs.status import Status

_LABEL_COLUMNS = 13
_MOST_LINES_OF_VALUE = 6
_BAR_COLUMNS = (10, 40)
_STYLES = {
    "QUEUED": "bold yellow",
    "INTERRUPTED": "bold yellow",
    "STARTING": "bold cyan",
    "RUNNING": "bold green",
    "STOPPING": "bold yellow",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "STOPPED": "bold yellow",
    "cloud": "bold red",
    "alarm": "bold red",
    "limit": "bold yellow",
    "slow": "bold yellow",
}


@dataclass
class Panel:
    """A rich renderable of a run's status. Assign to its fields; the next refresh shows them.

    Attributes:
        status: The newest status.
        status_time: When it was fetched, in seconds since the epoch.
        cloud_error: The error message of the last poll; empty when it succeeded.
        startup: What happens before the run's first output; empty after it.
        clock: Returns seconds since the epoch.
    """

    status: Status
    status_time: float
    cloud_error: str = ""
    startup: str = ""
    clock: Callable[[], float] = time.time

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel in the current width of the terminal."""
        yield from self.lines(options.max_width, ascii_only=options.ascii_only, console=console)

    def lines(self, width: int, *, console: Console, ascii_only: bool = False) -> Iterator[Text]:
        """Yield lines of at most `width` columns."""
        dash = "-" if ascii_only else "─"
        title = Text(f"{dash * 2} {self.status.reference} ", style="dim")
        title.append(dash * max(0, width - title.cell_len))
        title.truncate(width)
        yield title
        now = self.clock()
        done = progress_row(self.status, now)
        for label, value in self._rows(now):
            if (label, value) == done and self._fraction is not None:
                yield from _bar_lines(
                    label, value, self._fraction, width, console=console, ascii_only=ascii_only
                )
            else:
                yield from _value_lines(label, Text(as_one_line(value)), width, console)

    def _rows(self, now: float) -> Iterator[Row]:
        status = self.status
        yield from state_rows(status, now)
        if self.startup:
            yield "now", self.startup
        if self.cloud_error:
            age = format_duration(now - self.status_time)
            yield "cloud", f"no answer for {age}: {self.cloud_error}"
        yield from alarm_rows(status, now)
        yield from warning_rows(status)
        rows = (
            progress_row(status, now),
            limit_row(status, now),
            metrics_row(status),
            step_row(status),
            device_row(status),
            checkpoint_row(status, now),
            spent_row(status, now, status_time=self.status_time),
        )
        yield from (row for row in rows if row is not None)

    @property
    def _fraction(self) -> float | None:
        """Completed fraction of the steps, or None when their number is unknown."""
        progress = self.status.progress
        if not progress.total_steps or progress.last_step is None:
            return None
        return min(1.0, progress.last_step / progress.total_steps)


def _value_lines(label: str, value: Text, width: int, console: Console) -> Iterator[Text]:
    """Yield a label and its value beside it."""
    room = max(1, width - _LABEL_COLUMNS)
    wrapped = list(value.wrap(console, room, overflow="fold", no_wrap=False)) or [Text()]
    if len(wrapped) > _MOST_LINES_OF_VALUE:
        wrapped = wrapped[:_MOST_LINES_OF_VALUE]
        wrapped[-1] = Text(wrapped[-1].plain.rstrip()[: max(0, room - 3)] + "...")
    for index, line in enumerate(wrapped):
        line.rstrip()
        # Only the first line has the label.
        shown_label = "" if index else label
        start = f"{shown_label:<{_LABEL_COLUMNS}}"
        row = Text.assemble((start, _STYLES.get(label, "dim")), line)
        row.truncate(width)
        yield row


def _bar_lines(
    label: str, value: str, fraction: float, width: int, *, console: Console, ascii_only: bool
) -> Iterator[Text]:
    """Yield a progress bar and the text beside it, or below it where there is no room."""
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    least, most = _BAR_COLUMNS
    words = f"{fraction:.0%}  {value}"
    room = width - _LABEL_COLUMNS
    beside = room - len(words) - 2
    columns = min(most, beside if beside >= least else room)
    done = round(columns * fraction)
    bar = Text.assemble((full * done, "green"), (empty * (columns - done), "dim"))
    if columns < least:
        yield from _value_lines(label, Text(words), width, console)
    elif beside >= least:
        yield from _value_lines(label, Text.assemble(bar, "  ", words), width, console)
    else:
        yield from _value_lines(label, bar, width, console)
        yield from (line for line in _value_lines("", Text(words), width, console) if line.plain)
