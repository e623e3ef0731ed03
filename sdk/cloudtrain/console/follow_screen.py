"""Output of a followed run: a live panel below the log on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cloudtrain.console import print_message
from cloudtrain.console.log_folding import LogFolder, ShownLine
from cloudtrain.console.runs import HOST_COLOURS, format_log_line
from cloudtrain.console.status_fields import (
    as_one_line,
    progress_row,
    state_rows,
)
from cloudtrain.console.terminal import is_terminal, strip_unsafe_escapes, visible_part
from cloudtrain.runs.phases import describe_phases
from cloudtrain.runs.status import State
from cloudtrain.support.notebook.summary import count
from cloudtrain_runtime.contract import parse_event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.segment import Segment

    from cloudtrain.runs.log_lines import LogLine
    from cloudtrain.runs.status import Status
    from cloudtrain_runtime.contract.events import Event

_DRAW_SECONDS = 0.25
_PROGRESS_SECONDS = 60.0
_SILENCE_SECONDS = 300.0
"""Longest time without a line: some CI services end jobs that print nothing for ten minutes."""


@contextlib.contextmanager
def open_screen(out: Console) -> Iterator[Screen]:
    """Open a live panel on a terminal, or plain lines elsewhere; restore the terminal at the end."""
    if not is_live(out):
        yield Screen(out)
        return
    from rich.live import Live

    # The last screen takes the panel's place.
    live = Live(
        console=out,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=is_terminal(sys.stderr),
    )
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield _LiveScreen(out, live)
    except KeyboardInterrupt:
        ignore_interrupts()
        raise
    finally:
        live.stop()
        signal.signal(signal.SIGTERM, previous)


def is_live(out: Console) -> bool:
    """Return whether a panel can be redrawn: not in a pipe, a notebook or a CI log."""
    return is_terminal(out.file) and out.is_terminal


def ignore_interrupts() -> None:
    """Ignore further Ctrl-C: this process ends, and must restore the terminal first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


_FREQUENT = ("step", "checkpoint")


class EventThinner:
    """A filter that passes of steps and of checkpoints one line per interval of the run's time, and every other line.

    Args:
        seconds: The interval.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def wants(self, event: Event | None) -> bool:
        """Return whether to show a line with this event, or with none."""
        if event is None or event["event"] not in _FREQUENT or event.get("time") is None:
            return True
        last = self._last.get(event["event"])
        if last is not None and 0 <= event["time"] - last < self._seconds:
            return False
        self._last[event["event"]] = event["time"]
        return True


class Screen:
    """Where a followed run is shown: log lines, and a line about the status when it changes and at intervals.

    Attributes:
        is_silent: Whether the run has printed nothing yet, as far as is known.
        shows_all: Whether to show every line as it is, because the user has selected the lines.
    """

    def __init__(self, out: Console) -> None:
        self.is_silent = True
        self.shows_all = False
        self._out = out
        self._folder = LogFolder()
        self._shown: tuple[str, ...] = ()
        self._last_message_time = time.monotonic()

    def print(self, lines: Sequence[LogLine]) -> None:
        """Print log lines; equal ones of hosts and ranks are held back for a moment and become one."""
        self.is_silent &= not lines
        self._print_shown([shown for line in lines for shown in self._fold(line)])

    def print_due(self) -> None:
        """Print the lines that were held back long enough."""
        self._print_shown([*self._folder.due()])

    def print_rest(self) -> None:
        """Print the lines that are held back, because there will be no others."""
        self._print_shown([*self._folder.end()])

    def _fold(self, line: LogLine) -> Iterator[ShownLine]:
        if not self.shows_all:
            yield from self._folder.fold(line)
        elif (text := format_log_line(line)) is not None:
            yield ShownLine(line.host, text)

    def _print_shown(self, lines: Sequence[ShownLine]) -> None:
        for line in lines:
            print(strip_unsafe_escapes(f"{line.host}  {line.text}"), file=self._out.file)
        if lines:
            self._out.file.flush()

    def print_message(self, text: str) -> None:
        """Print a message."""
        print_message(text)
        self._last_message_time = time.monotonic()

    def show(self, status: Status, status_time: float, cloud_error: str) -> None:  # noqa: ARG002 (a message reports it)
        """Show the run's status, which was fetched at `status_time`, and the error message of the last poll."""
        if status.state.is_final:
            return
        phase = status.phases[-1].name if status.phases else ""
        shown = (str(status.state), phase, status.reason)
        silent_seconds = time.monotonic() - self._last_message_time
        if shown != self._shown:
            self._shown = shown
            self.print_message(state_line(status, self._startup(status)))
        elif (
            row := progress_row(status, time.time())
        ) is not None and silent_seconds >= _PROGRESS_SECONDS:
            self.print_message(f"{row[0]}: {row[1]}")
        elif silent_seconds >= _SILENCE_SECONDS:
            self.print_message(f"{status.state}: {describe_phases(status, time.time())}")

    def _startup(self, status: Status) -> str:
        """Return what happens before the run's first output, which the backend does not report; else nothing."""
        if not self.is_silent or status.progress.last_step is not None:
            return ""
        if status.state is State.RUNNING:
            ranks = "the ranks"
            if status.world_size is not None:
                ranks = count(status.world_size, "rank")
            return f"starting {ranks}, which import torch before their first output"
        if status.reason or status.phases:
            return ""
        return "preparing the code"


def state_line(status: Status, startup: str = "") -> str:
    """Return the state in one line: `QUEUED (Pending): Training job waiting for capacity; for 2 x ml.p4d.24xlarge`."""
    phase = f" ({status.phases[-1].name})" if status.phases else ""
    words = [
        value for label, value in state_rows(status, time.time()) if label != str(status.state)
    ]
    text = "; for ".join(words)
    if startup:
        text = "; ".join(part for part in (text.rstrip("."), startup) if part)
    if not text:
        return f"{status.state}{phase}"
    return f"{status.state}{phase}: {text}"


class _LiveScreen(Screen):
    """A panel below lines that scroll, drawn four times a second."""

    def __init__(self, out: Console, live: Live) -> None:
        super().__init__(out)
        self._live = live
        self._colours: dict[str, str] = {}
        self._drawn_time = 0.0

    def _fold(self, line: LogLine) -> Iterator[ShownLine]:
        # The panel shows the newest checkpoint.
        event = None if self.shows_all else parse_event(line.text)
        if event is None or event["event"] != "checkpoint":
            yield from super()._fold(line)

    def _print_shown(self, lines: Sequence[ShownLine]) -> None:
        from rich.segment import Segment, Segments
        from rich.style import Style

        segments: list[Segment] = []
        for line in lines:
            next_colour = HOST_COLOURS[len(self._colours) % len(HOST_COLOURS)]
            colour = self._colours.setdefault(line.host, next_colour)
            segments.append(Segment(f"{line.host}  ", Style(color=colour)))
            segments += line_segments(line.text, self._out)
        if segments:
            self._out.print(Segments(segments), soft_wrap=True, end="")

    def print_message(self, text: str) -> None:
        from rich.text import Text

        self._out.print(Text(as_one_line(text), style="yellow"), soft_wrap=True)

    def show(self, status: Status, status_time: float, cloud_error: str) -> None:
        from cloudtrain.console.panel import Panel

        panel = Panel(
            status=status,
            status_time=status_time,
            cloud_error=cloud_error,
            startup=self._startup(status),
        )
        self._live.update(panel)
        self._live.start()
        if time.monotonic() - self._drawn_time >= _DRAW_SECONDS:
            self._live.refresh()
            self._drawn_time = time.monotonic()


def line_segments(line: str, out: Console) -> Iterator[Segment]:
    """Yield a line with its colours and without cursor movements; of a progress bar its last state.

    Text without colours is not parsed by rich, which would take five times as long.
    """
    from rich.segment import Segment
    from rich.text import Text

    text = strip_unsafe_escapes(visible_part(line))
    if "\x1b" in text:
        yield from Text.from_ansi(text).render(out)
    else:
        yield Segment(text)
    yield Segment.line()
