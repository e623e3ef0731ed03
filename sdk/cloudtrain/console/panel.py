"""The panel below a followed run's log: computed anew whenever it is drawn, so that its times run between polls.

Only what draws on a terminal imports this module, because it needs rich.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from cloudtrain.console.view import (
    Row,
    alarm_rows,
    checkpoint_row,
    device_row,
    harmless,
    limit_row,
    metrics_row,
    progress_row,
    spent_row,
    state_rows,
    step_row,
    warning_rows,
)
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from cloudtrain.runs.status import Status

_LABEL_COLUMNS = 13
_LEAST_COLUMNS = 34
"""Where the terminal is narrower, a value begins below its label."""

_INDENT = 2
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
    """What is drawn. Assign to its fields; the next refresh shows it.

    Attributes:
        status: The newest status.
        told: When that was told, in seconds since the epoch.
        trouble: What the cloud says instead of a newer one; empty when it answers.
        clock: Seconds since the epoch.
    """

    status: Status
    told: float
    trouble: str = ""
    clock: Callable[[], float] = time.time

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as wide as the terminal is now."""
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
            if (label, value) == done and self._share is not None:
                yield from _bar_lines(label, value, self._share, width, console=console, ascii_only=ascii_only)
            else:
                yield from _lines(label, Text(harmless(value)), width, console)

    def _rows(self, now: float) -> Iterator[Row]:
        status = self.status
        yield from state_rows(status, now)
        if self.trouble:
            age = format_duration(max(0.0, now - self.told))
            yield "cloud", f"no answer for {age}: {self.trouble}"
        yield from alarm_rows(status, now)
        yield from warning_rows(status)
        rows = (
            progress_row(status, now),
            limit_row(status, now),
            metrics_row(status),
            step_row(status),
            device_row(status),
            checkpoint_row(status, now),
            spent_row(status, now, told=self.told),
        )
        yield from (row for row in rows if row is not None)

    @property
    def _share(self) -> float | None:
        """Part of the steps that are done, or None when their number is not known."""
        progress = self.status.progress
        if not progress.total_steps or progress.last_step is None:
            return None
        return min(1.0, progress.last_step / progress.total_steps)


def _lines(label: str, value: Text, width: int, console: Console) -> Iterator[Text]:
    """Yield a label and its value beside it, or below it where there is no room."""
    style = _STYLES.get(label, "dim")
    below = width < _LEAST_COLUMNS
    indent = min(_INDENT, width - 1) if below else _LABEL_COLUMNS
    wrapped = list(value.wrap(console, max(1, width - indent), overflow="fold", no_wrap=False)) if value.plain else []
    if len(wrapped) > _MOST_LINES_OF_VALUE:
        wrapped = wrapped[:_MOST_LINES_OF_VALUE]
        wrapped[-1] = Text(wrapped[-1].plain.rstrip()[: max(0, width - indent - 3)] + "...")
    head = Text(label, style=style)
    head.truncate(width)
    if below or not wrapped:
        yield head
    for index, line in enumerate(wrapped):
        line.rstrip()
        start = Text(f"{label:<{indent}}", style=style) if index == 0 and not below else Text(" " * indent)
        whole = Text.assemble(start, line)
        whole.truncate(width)
        yield whole


def _bar_lines(
    label: str, value: str, share: float, width: int, *, console: Console, ascii_only: bool
) -> Iterator[Text]:
    """Yield a bar and the words beside it, or below it where there is no room."""
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    least, most = _BAR_COLUMNS
    words = f"{share:.0%}  {value}"
    room = width - (_LABEL_COLUMNS if width >= _LEAST_COLUMNS else _INDENT)
    beside = room - len(words) - 2
    columns = min(most, beside if beside >= least else room)
    done = round(columns * share)
    bar = Text.assemble((full * done, "green"), (empty * (columns - done), "dim"))
    if columns < least:
        yield from _lines(label, Text(words), width, console)
    elif beside >= least:
        yield from _lines(label, Text.assemble(bar, "  ", words), width, console)
    else:
        yield from _lines(label, bar, width, console)
        yield from (line for line in _lines("", Text(words), width, console) if line.plain)
