"""A run followed to its end: its log, below it on a terminal how it stands, at the end how it ended and why.

Two threads ask the cloud, one for the status and one for log lines, so that neither waits for the other. This one
draws, prints and listens to Ctrl-C; it never waits for the cloud.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from cloudtrain.aws.retry import OutagePolicy, OutageTolerance
from cloudtrain.console import print_json, print_json_error, program, say, table_lines
from cloudtrain.console.logs import HOST_COLOURS
from cloudtrain.console.runs import (
    detached,
    explanation_lines,
    next_command,
    place_rows,
    readable,
    status_json,
    status_rows,
)
from cloudtrain.console.terminal import last_drawn, safe, unfiltered
from cloudtrain.console.view import describe_phases, harmless, progress_row, state_rows
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, CloudError
from cloudtrain.runs.log_lines import ALL_LINES
from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.segment import Segment

    from cloudtrain.console.panel import Panel
    from cloudtrain.runs.log_lines import LogFilter, LogLine
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import Status

Lines = Callable[[], Iterable["LogLine"]]
"""Begins to read a log; called again after an error of the cloud, when it must begin with the same lines."""

_DRAW_SECONDS = 0.25
_WAIT_SECONDS = 0.05
"""How long lines are waited for before the rest is looked at: the end of a run is seen so soon."""

_LEAST_POLL_SECONDS = 0.5
_LAST_LINES_SECONDS = 900.0
"""How long the reader may take for what a run has printed before its end: where many follow, AWS makes it slow."""

_UNREADABLE_SECONDS = 30.0
"""The same where the log cannot be read."""

_LATE_SECONDS = 5.0
"""After this long people are told what is waited for."""

_STEP_SECONDS = 10.0
"""Least time of the run between two lines that tell a step."""

_PROGRESS_SECONDS = 60.0
_SILENCE_SECONDS = 300.0
"""When something is said where nothing has happened: some CI ends jobs that are silent for ten minutes."""

_BATCH = 500
_QUEUED = 10_000


FOLLOW_OUTAGES = OutagePolicy(first_seconds=2.0, unanswered_limit_seconds=600.0)
"""Soon retried, because somebody watches; a run that was just submitted may be unreachable at first."""


def follow(
    run: Run,
    *,
    as_json: bool,
    job: str | None = None,
    only: LogFilter | None = None,
    outages: OutagePolicy = FOLLOW_OUTAGES,
) -> int:
    """Show a run until it ends; return the exit code. Ctrl-C leaves the run going.

    Args:
        run: What to follow; one that has ended is shown as it has.
        as_json: Print people's text to standard error, and one JSON object at the end.
        job: The words that name the job again, for what to type next, where there is a job file.
        only: Which log lines to show; by default all, of steps one each ten seconds.
        outages: How long errors of the cloud are tolerated, and the waits between retries.

    Raises:
        CloudError: the cloud has refused or not answered for too long. The run goes on.
    """
    wanted = ALL_LINES if only is None else only.from_now()

    def lines() -> Iterator[LogLine]:
        return run.logs(follow=True, only=wanted)

    threads = _Threads(run, lines, outages)
    out = _people(as_json=as_json)
    try:
        with _screen(out) as screen, threads:
            _show(threads, screen, _Thinner(_STEP_SECONDS if wanted.grep is None else 0.0))
            status = threads.status
    except KeyboardInterrupt:
        _deafen()
        return _detach(run, threads.known, as_json=as_json)
    _summary(out, status, job, is_drawn=_is_live(out))
    if status.exit_code == EXIT_RUN_FAILED:
        _explain(out, run)
    if as_json:
        print_json(status_json(run, status))
    return status.exit_code or 0


def _show(threads: _Threads, screen: _Screen, thinner: _Thinner) -> None:
    """Show what the threads bring until the run has ended and its last lines are here."""
    last_line = time.monotonic()
    was_told = False
    while True:
        threads.check()
        if lines := threads.take_lines(_WAIT_SECONDS):
            last_line = time.monotonic()
            screen.print([line for line in lines if thinner.wants(line)])
        silent = time.monotonic() - last_line
        is_over = threads.is_over(silent_seconds=silent)
        if is_over:
            threads.check()  # of what they have met on their last way, too
        for message in threads.take_messages():
            screen.say(message)
        if threads.known is not None:
            screen.show(threads.known, threads.told, threads.trouble)
        if is_over:
            return
        if threads.is_late and silent > _LATE_SECONDS and not was_told:
            was_told = True
            screen.say("the run has ended; waiting for the last lines of its log")


def _detach(run: Run, status: Status | None, *, as_json: bool) -> int:
    """Say how to come back. Nothing is asked any more: whoever presses Ctrl-C wants to leave now."""
    if as_json and status is not None:
        print_json(status_json(run, status))
    elif as_json:
        print_json_error(
            "interrupted before the state was known", f"cloudtrain status {run.reference}", EXIT_INTERRUPTED
        )
    return detached(run, "follow")


def _deafen() -> None:
    """Hear no further Ctrl-C: this process ends, and the terminal must be left whole."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---------------------------------------------------------------- asking the cloud


class _Asker(threading.Thread, abc.ABC):
    """Asks for one thing in a thread of its own, and waits out errors of the cloud.

    Attributes:
        trouble: What the cloud says instead of an answer; empty when it answers.
        error: What ended it, if it did not end by itself.
    """

    def __init__(self, name: str, outages: OutageTolerance) -> None:
        super().__init__(name=name, daemon=True)
        self.trouble = ""
        self.error: Exception | None = None
        self.is_done = threading.Event()
        self.ending = threading.Event()
        self._outages = outages

    def run(self) -> None:
        """Work until it is done, or the cloud has not answered for too long."""
        try:
            while not self.ending.is_set():
                try:
                    self.work()
                except CloudError as error:
                    self._wait_out(error)
                else:
                    return
        except Exception as error:  # noqa: BLE001 (told by the thread that draws, see `_Threads.check`)
            self.error = error
        finally:
            self.is_done.set()

    @abc.abstractmethod
    def work(self) -> None:
        """Ask until there is no more to ask for."""

    def answered(self) -> None:
        """Take note that the cloud answers."""
        self._outages.succeeded(self.name)
        self.trouble = ""

    def _wait_out(self, error: CloudError) -> None:
        seconds = self._outages.failed(error, self.name)
        self.trouble = error.message
        self.ending.wait(seconds)


class _StatusAsker(_Asker):
    """Asks for the status again and again until the run has ended."""

    def __init__(self, run: Run, outages: OutageTolerance) -> None:
        super().__init__("the status", outages)
        self._run = run
        self.status: Status | None = None
        self.told = 0.0
        self.asks_now = threading.Event()

    def work(self) -> None:
        backoff = self._run.poll_backoff()
        while not self.ending.is_set():
            status = self._run.status()
            self.answered()
            before, self.status, self.told = self.status, _remembering(status, self.status), time.time()
            if status.state.is_final:
                return
            has_changed = before is None or (before.state, before.reason, before.progress) != (
                status.state,
                status.reason,
                status.progress,
            )
            self.asks_now.wait(max(backoff.next_seconds(changed=has_changed), _LEAST_POLL_SECONDS))
            self.asks_now.clear()


def _remembering(status: Status, before: Status | None) -> Status:
    """Return a status with what was told before and is not told now.

    The end of a log may not hold the last checkpoint any more, and that of new instances holds nothing at first.
    """
    if before is None:
        return status
    progress = status.progress
    if progress.last_step is None:
        progress = dataclasses.replace(
            before.progress,
            host_ranks={**before.progress.host_ranks, **progress.host_ranks},
            host_files={**before.progress.host_files, **progress.host_files},
        )
    if progress.checkpoint is None and not progress.damaged:
        earlier = before.progress
        progress = dataclasses.replace(
            progress,
            checkpoint=earlier.checkpoint,
            checkpoints_before=earlier.checkpoints_before,
            missed=progress.missed or earlier.missed,
            damaged=earlier.damaged,
        )
    return dataclasses.replace(status, progress=progress)


class _LineAsker(_Asker):
    """Reads the log to its end. Begins anew after an error and passes over what it has brought already."""

    def __init__(self, lines: Lines, outages: OutageTolerance) -> None:
        super().__init__("the log", outages)
        self._lines = lines
        self._brought: Counter[str] = Counter()
        self.lines: queue.Queue[LogLine] = queue.Queue(_QUEUED)

    def work(self) -> None:
        passed: Counter[str] = Counter()
        for line in self._lines():
            self.answered()
            passed[line.host] += 1
            if passed[line.host] > self._brought[line.host]:
                self._put(line)
                self._brought[line.host] += 1

    def _put(self, line: LogLine) -> None:
        while not self.ending.is_set():
            with contextlib.suppress(queue.Full):
                self.lines.put(line, timeout=_WAIT_SECONDS)
                return


class _Threads:
    """The two that ask, as the thread that draws sees them."""

    def __init__(self, run: Run, lines: Lines, policy: OutagePolicy) -> None:
        self._reference = run.reference
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        outages = OutageTolerance(self._messages.put, policy)
        self._asker = _StatusAsker(run, outages)
        self._reader = _LineAsker(lines, outages)

    def __enter__(self) -> None:
        self._asker.start()
        self._reader.start()

    def __exit__(self, *_: object) -> None:
        for thread in (self._asker, self._reader):
            thread.ending.set()
        self._asker.asks_now.set()

    @property
    def known(self) -> Status | None:
        """The newest status, or None before the first."""
        return self._asker.status

    @property
    def status(self) -> Status:
        """The newest status, once there is one."""
        if self._asker.status is None:
            raise RuntimeError("no status was told")
        return self._asker.status

    @property
    def told(self) -> float:
        """When it was told, in seconds since the epoch."""
        return self._asker.told

    @property
    def trouble(self) -> str:
        """What the cloud says instead of a newer status; empty when it answers."""
        return self._asker.trouble

    def check(self) -> None:
        """Raise what ended a thread too early.

        Raises:
            CloudError: the cloud has not told the status for too long.
        """
        error = self._asker.error
        if isinstance(error, CloudError):
            hint = f"the run goes on; to come back to it: {program()} follow {self._reference}"
            raise CloudError(error.message, f"{error.hint}\n  {hint}" if error.hint else hint) from error
        if error is not None:
            raise error
        if isinstance(self._reader.error, CloudError):
            self._messages.put(f"the log is not read any more: {self._reader.error.message}")
            self._reader.error = None
        elif self._reader.error is not None:
            raise self._reader.error
        if self._reader.is_done.is_set() and not self._asker.is_done.is_set():
            self._asker.asks_now.set()  # it has seen the end

    def take_lines(self, seconds: float) -> list[LogLine]:
        """Return the lines that have come, at most so many at a time; wait for the first."""
        lines: list[LogLine] = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._reader.lines.get(timeout=seconds))
            while len(lines) < _BATCH:
                lines.append(self._reader.lines.get_nowait())
        return lines

    def take_messages(self) -> Iterator[str]:
        """Yield what is to be said once."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()

    def is_over(self, *, silent_seconds: float) -> bool:
        """Whether the run has ended and its last lines are here, or do not come."""
        if self.known is None or not self.known.state.is_final:
            return False
        has_all = self._reader.is_done.is_set()  # asked before the queue: its last line is in it by then
        longest = _UNREADABLE_SECONDS if self._reader.trouble else _LAST_LINES_SECONDS
        return self._reader.lines.empty() and (has_all or silent_seconds > longest)

    @property
    def is_late(self) -> bool:
        """Whether the run has ended, and its last lines are still to come."""
        return self.known is not None and self.known.state.is_final and not self._reader.is_done.is_set()


# ---------------------------------------------------------------- showing


class _Screen(Protocol):
    """Where a followed run is shown."""

    def print(self, lines: Sequence[LogLine]) -> None:
        """Print log lines."""
        ...

    def say(self, text: str) -> None:
        """Print a line for people."""
        ...

    def show(self, status: Status, told: float, trouble: str) -> None:
        """Show how the run stands; `told` is when that was said."""
        ...


class _Thinner:
    """Lets through one line in so many seconds, by the run's own time, of those that tell a step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: float | None = None

    def wants(self, line: LogLine) -> bool:
        """Whether to show a line."""
        event = parse_event(line.text) if EVENT_PREFIX in line.text else None
        if event is None or event["event"] != "step" or event.get("time") is None:
            return True
        if self._last is not None and 0 <= event["time"] - self._last < self._seconds:
            return False
        self._last = event["time"]
        return True


@contextlib.contextmanager
def _screen(out: Console) -> Iterator[_Screen]:
    """Give a panel on a terminal, and plain lines elsewhere. Whatever happens, the terminal is whole afterwards."""
    if not _is_live(out):
        yield _Plain(out)
        return
    from rich.live import Live

    live = Live(console=out, auto_refresh=False, redirect_stdout=False, redirect_stderr=sys.stderr.isatty())
    terminated = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield _Drawn(out, live)
    except KeyboardInterrupt:
        _deafen()
        raise
    finally:
        live.stop()
        signal.signal(signal.SIGTERM, terminated)


def _is_live(out: Console) -> bool:
    """Whether a panel can be drawn over and over: not into a pipe, a notebook or the log of a CI."""
    is_read_later = bool(os.environ.get("CI") or os.environ.get("JPY_PARENT_PID"))
    return out.file.isatty() and out.is_terminal and not out.is_dumb_terminal and not is_read_later


class _Plain:
    """Lines, where nothing can be drawn over: log lines, and now and then how the run stands."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._shown: tuple[str, ...] = ()
        self._said = time.monotonic()

    def print(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            if (text := readable(line)) is not None:
                print(safe(f"{line.host}  {text}"), file=self._out.file)
        self._out.file.flush()

    def say(self, text: str) -> None:
        say(text)
        self._said = time.monotonic()

    def show(self, status: Status, told: float, trouble: str) -> None:  # noqa: ARG002 (said once, when it came)
        if status.state.is_final:
            return
        phase = status.phases[-1].name if status.phases else ""
        shown = (str(status.state), phase, status.reason)
        silent = time.monotonic() - self._said
        if shown != self._shown:
            self._shown = shown
            self.say(_state_line(status))
        elif (row := progress_row(status, time.time())) is not None and silent >= _PROGRESS_SECONDS:
            self.say(f"{row[0]}: {row[1]}")
        elif silent >= _SILENCE_SECONDS:
            self.say(f"{status.state}: {describe_phases(status, time.time())}")


def _state_line(status: Status) -> str:
    """Return the state in one line: `QUEUED (Pending): Training job waiting for capacity; for 2 x ml.p4d.24xlarge`."""
    phase = f" ({status.phases[-1].name})" if status.phases else ""
    words = [value for label, value in state_rows(status, time.time()) if label != str(status.state)]
    return f"{status.state}{phase}" + (f": {'; for '.join(words)}" if words else "")


class _Drawn:
    """A panel below lines that scroll, drawn four times a second."""

    def __init__(self, out: Console, live: Live) -> None:
        self._out, self._live = out, live
        self._panel: Panel | None = None
        self._colours: dict[str, str] = {}
        self._drawn = 0.0

    def print(self, lines: Sequence[LogLine]) -> None:
        from rich.segment import Segment, Segments
        from rich.style import Style

        segments: list[Segment] = []
        for line in lines:
            if (text := readable(line)) is None:
                continue
            colour = self._colours.setdefault(line.host, HOST_COLOURS[len(self._colours) % len(HOST_COLOURS)])
            segments.append(Segment(f"{line.host}  ", Style(color=colour)))
            segments += _segments(text, self._out)
        if segments:
            self._out.print(Segments(segments), soft_wrap=True, end="")

    def say(self, text: str) -> None:
        from rich.text import Text

        self._out.print(Text(harmless(text), style="yellow"), soft_wrap=True)

    def show(self, status: Status, told: float, trouble: str) -> None:
        from cloudtrain.console.panel import Panel

        if self._panel is None:
            self._panel = Panel(status, told)
            self._live.update(self._panel)
            self._live.start()
        self._panel.status, self._panel.told, self._panel.trouble = status, told, trouble
        if time.monotonic() - self._drawn >= _DRAW_SECONDS:
            self._live.refresh()
            self._drawn = time.monotonic()


def _segments(line: str, out: Console) -> Iterator[Segment]:
    """Yield a line with its colours, and with nothing that moves the cursor; of a bar drawn over and over the last.

    Text that has no colours goes past rich's own, which takes five times as long.
    """
    from rich.segment import Segment
    from rich.text import Text

    text = safe(last_drawn(line))
    if "\x1b" in text:
        yield from Text.from_ansi(text).render(out)
    else:
        yield Segment(text)
    yield Segment.line()


# ---------------------------------------------------------------- the end


def _people(*, as_json: bool) -> Console:
    from rich.console import Console

    # It draws on the terminal; what others have written passes `safe` or `harmless` before.
    return Console(file=unfiltered(sys.stderr if as_json else sys.stdout), stderr=as_json)


def _summary(out: Console, status: Status, job: str | None, *, is_drawn: bool) -> None:
    """Print how a followed run has ended, and what to type next. Paths stay whole, so that they can be copied.

    What the panel has told, whose last state stays, is not told again.
    """
    rows = place_rows(status) if is_drawn else status_rows(status)
    for line in ["", *table_lines(rows), "", f"next: {next_command(status, job)}"]:
        print(safe(line), file=out.file)


def _explain(out: Console, run: Run) -> None:
    """Print why a followed run has failed. What cannot be read does not hide how it ended."""
    from cloudtrain.client.runs import explain

    try:
        lines = explanation_lines(explain(run), run.reference)
    except CloudError as error:
        lines = [f"not explained: {error}"]
    for line in ("", *lines):
        print(safe(line), file=out.file)
