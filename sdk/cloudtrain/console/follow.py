"""Follow a run to its end: its log, its status below the log on a terminal, and its result.

One thread fetches the status and one the log, so that neither waits for the other. The main thread draws, prints and
handles Ctrl-C; it never waits for the cloud.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import Backoff, OutagePolicy, OutageTolerance, poll
from cloudtrain.client.next_step import explain_end
from cloudtrain.console import column_lines, command_name, print_json, print_json_error
from cloudtrain.console.closing import Ending, SeenEvents, closing_lines
from cloudtrain.console.follow_screen import (
    EventThinner,
    Screen,
    ignore_interrupts,
    is_live,
    open_screen,
)
from cloudtrain.console.runs import (
    explanation_rows,
    next_step,
    print_detached,
    status_json,
    status_rows,
)
from cloudtrain.console.terminal import strip_unsafe_escapes, unfiltered
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, CloudError
from cloudtrain.runs.following import LEAST_POLL_SECONDS, shown_part
from cloudtrain.runs.log_lines import ALL_LINES
from cloudtrain_runtime.contract import parse_event

if TYPE_CHECKING:
    from rich.console import Console

    from cloudtrain.failure_rules import Facts
    from cloudtrain.runs.log_lines import LogFilter, LogLine
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import Status


_STEP_SECONDS = 10.0
"""Shortest time of the run between two step lines that are shown."""

_LATE_LINES_SECONDS = 5.0
"""How long to wait for the last lines before a message says so."""

FOLLOW_OUTAGES = OutagePolicy(first_seconds=2.0, unanswered_limit_seconds=600.0, errors=CloudError)
"""Retries begin soon, because a user is watching, who reads each error and can log in again, for example. A run that was
just submitted may not be visible at first."""


def follow(
    run: Run,
    *,
    as_json: bool,
    job: str | None = None,
    only: LogFilter | None = None,
    outages: OutagePolicy = FOLLOW_OUTAGES,
) -> int:
    """Show a run until it ends; return the exit code. Ctrl-C ends the command, not the run.

    Args:
        run: The run; one that has ended is shown with its log and result.
        as_json: Print text to standard error, and one JSON object at the end.
        job: Command-line words that name the job file, for the suggested next command.
        only: Which log lines to show; by default all, but one step line per ten seconds.
        outages: How long errors of the cloud are tolerated, and the waits between retries.

    Raises:
        CloudError: The cloud has refused or not answered for too long. The run continues.
    """
    from rich.console import Console

    wanted = ALL_LINES if only is None else only.from_now()
    monitor = RunMonitor(run, wanted, outages)
    seen = SeenEvents()
    # The console draws on the terminal, so it bypasses the filter. Callers filter text of third parties by
    # `strip_unsafe_escapes` or `as_one_line`.
    stream = unfiltered(sys.stderr if as_json else sys.stdout)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    out = Console(file=stream, stderr=as_json)
    try:
        with open_screen(out) as screen, monitor:
            screen.shows_all = wanted != ALL_LINES
            screen.is_silent = not screen.shows_all
            thinner = EventThinner(_STEP_SECONDS if wanted.grep is None else 0.0)
            try:
                status = _show(monitor, screen, thinner, seen)
            finally:
                screen.print_rest()
    except KeyboardInterrupt:
        ignore_interrupts()
        return _detach(run, monitor.status, as_json=as_json)
    ending = _ending(run, status, seen, job)
    if is_live(out):
        width = out.size.width
        _print_lines(out, ["", *closing_lines(ending, width, now=time.time())])
    else:
        _print_lines(out, ["", *_ending_lines(ending)])
    if as_json:
        print_json(status_json(run, status))
    return status.exit_code or 0


def _ending(run: Run, status: Status, seen: SeenEvents, job: str | None) -> Ending:
    """Return how a followed run has ended. An unreadable log does not hide it."""
    facts = _facts(run)
    cause = None
    unexplained = ""
    if status.exit_code == EXIT_RUN_FAILED:
        try:
            cause = explain_end(run, status, facts)
        except CloudError as error:
            unexplained = error.for_terminal()
    return Ending(status, seen, cause, unexplained, facts, job)


def _ending_lines(ending: Ending) -> list[str]:
    """Return how a run has ended for a pipe: one fact per line, with its key."""
    status = ending.status
    lines = column_lines(status_rows(status))
    if ending.cause is not None:
        rows = explanation_rows(ending.cause, status.reference, with_state=False)
        lines += ["", *column_lines(rows)]
    elif ending.unexplained:
        lines += ["", f"not explained: {ending.unexplained}"]
    step = next_step(status, ending.job, ending.cause, ending.facts)
    return [*lines, "", f"next: {step.text}"]


def _show(monitor: RunMonitor, screen: Screen, thinner: EventThinner, seen: SeenEvents) -> Status:
    """Show the run until it has ended and its last lines have arrived; return its last status."""
    last_line_time = time.monotonic()
    has_warned = False
    while True:
        monitor.check()
        if lines := monitor.take_lines(POLL_LINES_SECONDS):
            last_line_time = time.monotonic()
            events = [(line, parse_event(line.text)) for line in lines]
            for _, event in events:
                if event is not None:
                    seen.add(event)
            screen.print([line for line, event in events if thinner.wants(event)])
        screen.print_due()
        silent_seconds = time.monotonic() - last_line_time
        is_over = monitor.is_over(silent_seconds=silent_seconds)
        if is_over:
            # A thread may have failed since the first check.
            monitor.check()
        for message in monitor.take_messages():
            screen.print_message(message)
        if monitor.status is not None:
            screen.show(monitor.status, monitor.status_time, monitor.cloud_error)
            if is_over:
                return monitor.status
        if monitor.is_waiting_for_lines and silent_seconds > _LATE_LINES_SECONDS and not has_warned:
            has_warned = True
            screen.print_message("the run has ended; waiting for the last lines of its log")


def _detach(run: Run, status: Status | None, *, as_json: bool) -> int:
    """Print how to follow the run again. The cloud is not called, so that Ctrl-C ends the command at once."""
    if as_json and status is not None:
        print_json(status_json(run, status))
    elif as_json:
        print_json_error(
            "interrupted before the state was known",
            f"cloudtrain status {run.reference}",
            EXIT_INTERRUPTED,
        )
    return print_detached(run, "follow")


def _print_lines(out: Console, lines: list[str]) -> None:
    """Print lines that are not wrapped, so that paths can be copied."""
    for line in lines:
        print(strip_unsafe_escapes(line), file=out.file)
    out.file.flush()


def _facts(run: Run) -> Facts:
    """Return the known values of a run's job; none while the cloud does not answer."""
    try:
        return run.facts()
    except CloudError:
        return {}


POLL_LINES_SECONDS = 0.05
"""How long to wait for log lines before the status is looked at again."""

_LAST_LINES_SECONDS = 900.0
"""How long to wait for the last lines of a run that has ended. With many readers, CloudWatch Logs delays them."""

_UNREADABLE_LOG_SECONDS = 30.0
"""The same while the log cannot be read."""

_STATUS = "the status"
_LOG = "the log"
_BATCH_LINES = 500
_QUEUED_LINES = 10_000


class RunMonitor:
    """The status and the log lines of a run, which two threads fetch. Use it as a context manager.

    Args:
        run: The run.
        only: Which log lines to read.
        policy: How long errors of the cloud are tolerated, and the waits between retries.

    Attributes:
        status: The newest status, or None before the first.
        status_time: When it was fetched, in seconds since the epoch.
    """

    def __init__(self, run: Run, only: LogFilter, policy: OutagePolicy) -> None:
        self.status: Status | None = None
        self.status_time = 0.0
        self._run = run
        self._only = only
        self._lines: queue.Queue[LogLine] = queue.Queue(_QUEUED_LINES)
        self._line_counts: Counter[str] = Counter()
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._poll_now = threading.Event()
        self._should_stop = threading.Event()
        self._outages = OutageTolerance(self._messages.put, policy)
        self._status_fetcher = _Fetcher(self._poll_status)
        self._log_fetcher = _Fetcher(self._read_log)

    def __enter__(self) -> None:
        self._status_fetcher.start()
        self._log_fetcher.start()

    def __exit__(self, *_: object) -> None:
        self._should_stop.set()
        self._poll_now.set()

    @property
    def cloud_error(self) -> str:
        """The error message of the last poll; empty when it succeeded."""
        return self._outages.last_error(_STATUS)

    def check(self) -> None:
        """Raise the error that ended a thread early.

        Raises:
            CloudError: The status could not be fetched for too long.
        """
        error = self._status_fetcher.error
        log_error = self._log_fetcher.error
        if isinstance(error, CloudError):
            hint = f"the run continues; to follow it again: {command_name()} follow {self._run.reference}"
            raise CloudError(
                error.message, f"{error.hint}\n  {hint}" if error.hint else hint
            ) from error
        if error is not None:
            raise error
        if isinstance(log_error, CloudError):
            self._messages.put(f"stopped reading the log: {log_error.message}")
            self._log_fetcher.error = None
        elif log_error is not None:
            raise log_error

    def take_lines(self, timeout_seconds: float) -> list[LogLine]:
        """Return the next log lines, at most one batch; wait for the first."""
        lines: list[LogLine] = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._lines.get(timeout=timeout_seconds))
            while len(lines) < _BATCH_LINES:
                lines.append(self._lines.get_nowait())
        return lines

    def take_messages(self) -> Iterator[str]:
        """Yield messages that were not yielded before."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()

    def is_over(self, *, silent_seconds: float) -> bool:
        """Return whether the run has ended and its last lines have arrived, or there was no line for too long."""
        if self.status is None or not self.status.state.is_final:
            return False
        # Read before the queue, which then contains the last line.
        has_all = self._log_fetcher.is_done.is_set()
        is_unreadable = self._outages.last_error(_LOG)
        timeout = _UNREADABLE_LOG_SECONDS if is_unreadable else _LAST_LINES_SECONDS
        return self._lines.empty() and (has_all or silent_seconds > timeout)

    @property
    def is_waiting_for_lines(self) -> bool:
        """Whether the run has ended and its last lines have not arrived."""
        has_ended = self.status is not None and self.status.state.is_final
        return has_ended and not self._log_fetcher.is_done.is_set()

    def _poll_status(self) -> None:
        """Poll the status until the run has ended."""
        for status in poll(
            self._run.status,
            self._run.poll_backoff(),
            self._outages,
            call=_STATUS,
            changing=shown_part,
            least_seconds=LEAST_POLL_SECONDS,
            pause=self._pause,
        ):
            self.status = _keep_known(status, self.status)
            self.status_time = time.time()
            if status.state.is_final:
                return

    def _pause(self, seconds: float) -> bool:
        """Wait until the next poll; return whether there is none."""
        self._poll_now.wait(seconds)
        self._poll_now.clear()
        return self._should_stop.is_set()

    def _read_log(self) -> None:
        """Read the log to its end. After an error, read again from the beginning and skip the known lines."""
        tries = poll(
            self._read_lines,
            Backoff(LEAST_POLL_SECONDS),
            self._outages,
            call=_LOG,
            pause=self._should_stop.wait,
        )
        next(tries, None)
        # The log ends when the run does.
        self._poll_now.set()

    def _read_lines(self) -> None:
        read: Counter[str] = Counter()
        for line in self._run.logs(follow=True, only=self._only):
            self._outages.succeeded(_LOG)
            read[line.host] += 1
            if read[line.host] > self._line_counts[line.host]:
                self._put(line)
                self._line_counts[line.host] += 1

    def _put(self, line: LogLine) -> None:
        while not self._should_stop.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(line, timeout=POLL_LINES_SECONDS)
                return


class _Fetcher(threading.Thread):
    """A thread that fetches one thing until there is no more.

    Attributes:
        error: The error that ended the thread, or None.
    """

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self.is_done = threading.Event()
        self._fetch = fetch

    def run(self) -> None:
        """Fetch until there is no more, or an outage has lasted too long."""
        try:
            self._fetch()
        except Exception as error:  # noqa: BLE001 (`RunMonitor.check` raises it in the main thread)
            self.error = error
        finally:
            self.is_done.set()


def _keep_known(status: Status, before: Status | None) -> Status:
    """Return a status with the progress of the previous one where the new one has none.

    The end of a log may no longer contain the last checkpoint, and the log of new instances is empty at first.
    """
    if before is None:
        return status
    progress = status.progress
    known = before.progress
    if progress.last_step is None:
        progress = dataclasses.replace(
            known,
            host_environments={**known.host_environments, **progress.host_environments},
            host_ranks={**known.host_ranks, **progress.host_ranks},
            host_files={**known.host_files, **progress.host_files},
            hidden_failure=progress.hidden_failure,
            has_attempts=progress.has_attempts or known.has_attempts,
            prepared_at=known.prepared_at or progress.prepared_at,
            began_at=known.began_at or progress.began_at,
        )
    if progress.checkpoint is None and not progress.damaged:
        progress = dataclasses.replace(
            progress,
            checkpoint=known.checkpoint,
            checkpoints_before=known.checkpoints_before,
            missed=progress.missed or known.missed,
            damaged=known.damaged,
        )
    return dataclasses.replace(status, progress=progress)
