"""What a plan, a check or a submit shows while it works."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from cloudtrain.client.observer import Observer
from cloudtrain.console import command_name, print_message, progress_bar
from cloudtrain.console.plans import print_warnings
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.planning.plan import Plan
    from cloudtrain.preflight import Check
    from cloudtrain.runs.run import Run


class ConsoleObserver(Observer):
    """Draws progress bars and prints messages on standard error. Use it as a context manager.

    The plan's warnings are printed at the end of the block: the command's output may be redirected to a file in the
    code folder, which must not change while it is packed.

    Args:
        reading: Text of the progress bar while the code is read.
    """

    def __init__(self, reading: str = "reading the code") -> None:
        self._reading = reading
        self._stack = ExitStack()
        self._plan: Plan | None = None

    def __enter__(self) -> Self:
        self._show_read = self._stack.enter_context(progress_bar(self._reading))
        self._show_upload = self._stack.enter_context(progress_bar("uploading"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._plan is not None:
            if self._plan.rehearsal is not None:
                print_message(f"rehearsal: {self._plan.rehearsal['text']}")
            print_warnings(self._plan)

    def on_read(self, bytes_done: int, bytes_total: int) -> None:
        """Draw how much of the code has been read."""
        self._show_read(bytes_done, bytes_total)

    def on_plan(self, plan: Plan) -> None:
        """Keep the plan for the end of the block."""
        self._plan = plan

    def on_checks(self, checks: tuple[Check, ...]) -> None:
        """Print the details, warnings and unknown results of the checks."""
        for check in checks:
            if check.is_shown:
                print_message(f"{check.name}: {check.detail}")
            if check.warning:
                print_message(f"warning: {check.warning}")
        names = [check.name for check in checks if check.result == "unknown"]
        if names:
            print_message(f"could not check: {', '.join(names)} (why: {command_name()} check JOB)")

    def on_upload(self, bytes_done: int, bytes_total: int) -> None:
        """Draw how much has been uploaded."""
        self._show_upload(bytes_done, bytes_total)

    def on_sent(self, run: Run) -> None:
        """Print the run that waits for its instances."""
        print_message(f"{run.reference} waits for its instances; Ctrl-C ends this command, not the run")
        print_message(f"  to stop it: {command_name()} stop {run.reference}")

    def on_wait(self, reason: str, seconds: float) -> None:
        """Print why and when the submit is retried."""
        first_line, pause = reason.strip().splitlines()[0], format_duration(max(1, round(seconds)))
        print_message(f"no capacity yet: {first_line}; retry in {pause}")
