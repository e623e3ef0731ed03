"""What a client reports while it works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.steps import Steps

if TYPE_CHECKING:
    from cloudtrain.errors import CloudtrainError
    from cloudtrain.job.sections.recover import Recover
    from cloudtrain.planning.plan import Plan
    from cloudtrain.runs.run import Run
    from cloudtrain.support.checks import Check


class Observer(Steps):
    """Receives what a client reports while it works. Subclass it and override the methods that you need."""

    def on_read(self, bytes_done: int, bytes_total: int) -> None:
        """Receive how much of the code has been read or packed."""

    def on_plan(self, plan: Plan) -> None:
        """Receive the plan before anything is packed, checked or sent, so that its warnings can be shown."""

    def on_checks(self, checks: tuple[Check, ...]) -> None:
        """Receive the checks of the account when none of them has failed; some may be unknown."""

    def on_upload(self, bytes_done: int, bytes_total: int) -> None:
        """Receive how much has been uploaded."""

    def on_sent(self, run: Run) -> None:
        """Receive each run that a submit with `wait_for_capacity` has sent, before it waits for the instances."""

    def on_wait(self, reason: str, seconds: float) -> None:
        """Receive the reason and the length of each pause of `wait_for_capacity`."""

    def on_recover(self, limits: Recover) -> None:
        """Receive the limits within which a submitted run continues by itself after an outside cause."""

    def on_check(self, check: Check, seconds_left: float) -> None:
        """Receive each check of a rehearsal when it is known, and the seconds that the rehearsal has left."""

    def on_unreachable(self, error: CloudtrainError) -> None:
        """Receive why the runs of a backend cannot be listed. By default the error is raised."""
        raise error
