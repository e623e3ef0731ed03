"""Follow a run to its end: its log, its status below the log on a terminal, and its result.

The threads of `run_monitor` call the cloud. This one draws, prints and handles Ctrl-C; it never waits for the cloud.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import OutagePolicy
from cloudtrain.console import column_lines, print_json, print_json_error
from cloudtrain.console.follow_screen import Screen, StepThinner, ignore_interrupts, is_live, open_screen
from cloudtrain.console.run_monitor import POLL_LINES_SECONDS, RunMonitor
from cloudtrain.console.runs import (
    explanation_lines,
    location_rows,
    next_command,
    print_detached,
    status_json,
    status_rows,
)
from cloudtrain.console.terminal import strip_unsafe_escapes, unfiltered
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, CloudError
from cloudtrain.runs.log_lines import ALL_LINES

if TYPE_CHECKING:
    from rich.console import Console

    from cloudtrain.runs.log_lines import LogFilter
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import Status

_STEP_SECONDS = 10.0
"""Shortest time of the run between two step lines that are shown."""

_LATE_LINES_SECONDS = 5.0
"""How long to wait for the last lines before a message says so."""

FOLLOW_OUTAGES = OutagePolicy(first_seconds=2.0, unanswered_limit_seconds=600.0)
"""Retries begin soon, because a user is watching. A run that was just submitted may not be visible at first."""


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
    # The console draws on the terminal, so it bypasses the filter. Callers filter text of third parties by
    # `strip_unsafe_escapes` or `as_one_line`.
    out = Console(file=unfiltered(sys.stderr if as_json else sys.stdout), stderr=as_json)
    try:
        with open_screen(out) as screen, monitor:
            screen.is_silent = wanted == ALL_LINES
            status = _show(monitor, screen, StepThinner(_STEP_SECONDS if wanted.grep is None else 0.0))
    except KeyboardInterrupt:
        ignore_interrupts()
        return _detach(run, monitor.status, as_json=as_json)
    # The panel stays on the screen, so a summary below it repeats nothing of it.
    rows = location_rows(status) if is_live(out) else status_rows(status)
    _print_lines(out, ["", *column_lines(rows), "", f"next: {next_command(status, job)}"])
    if status.exit_code == EXIT_RUN_FAILED:
        _print_lines(out, ["", *_explain(run)])
    if as_json:
        print_json(status_json(run, status))
    return status.exit_code or 0


def _show(monitor: RunMonitor, screen: Screen, thinner: StepThinner) -> Status:
    """Show the run until it has ended and its last lines have arrived; return its last status."""
    last_line_time = time.monotonic()
    has_warned = False
    while True:
        monitor.check()
        if lines := monitor.take_lines(POLL_LINES_SECONDS):
            last_line_time = time.monotonic()
            screen.print([line for line in lines if thinner.wants(line)])
        silent_seconds = time.monotonic() - last_line_time
        is_over = monitor.is_over(silent_seconds=silent_seconds)
        if is_over:
            monitor.check()  # a thread may have failed since the first check
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
            "interrupted before the state was known", f"cloudtrain status {run.reference}", EXIT_INTERRUPTED
        )
    return print_detached(run, "follow")


def _print_lines(out: Console, lines: list[str]) -> None:
    """Print lines that are not wrapped, so that paths can be copied."""
    for line in lines:
        print(strip_unsafe_escapes(line), file=out.file)


def _explain(run: Run) -> list[str]:
    """Return why a followed run has failed. An unreadable log does not hide how the run ended."""
    from cloudtrain.client.shortcuts import explain

    try:
        return explanation_lines(explain(run), run.reference)
    except CloudError as error:
        return [f"not explained: {error}"]
