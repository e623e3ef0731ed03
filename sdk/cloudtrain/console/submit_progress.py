"""What a plan, a check or a submit shows while it works."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from cloudtrain.client.observer import Observer
from cloudtrain.console import progress_bar
from cloudtrain.console.account import print_check_messages
from cloudtrain.console.plans import print_warnings
from cloudtrain.console.runs import print_retry, print_waiting_for_instances

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
            print_warnings(self._plan)

    def on_read(self, bytes_done: int, bytes_total: int) -> None:
        """Draw how much of the code has been read."""
        self._show_read(bytes_done, bytes_total)

    def on_plan(self, plan: Plan) -> None:
        """Keep the plan for the end of the block."""
        self._plan = plan

    def on_checks(self, checks: tuple[Check, ...]) -> None:
        """Print the messages of the checks."""
        print_check_messages(checks)

    def on_upload(self, bytes_done: int, bytes_total: int) -> None:
        """Draw how much has been uploaded."""
        self._show_upload(bytes_done, bytes_total)

    def on_sent(self, run: Run) -> None:
        """Print the run that waits for its instances."""
        print_waiting_for_instances(run)

    def on_wait(self, reason: str, seconds: float) -> None:
        """Print when the submit is retried."""
        print_retry(reason, seconds)
