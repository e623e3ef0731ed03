"""When all ranks of a run save and stop: the job's interval, and the notice to stop."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.process_group import Agreement, Row
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.stop_notice import StopNotice


@dataclass(frozen=True)
class BoundaryDecision:
    """What all ranks have agreed to do at a step boundary."""

    save: bool
    stop: bool


class StepBoundary:
    """Decides for all ranks when to save and when to stop. All ranks create it and call its methods together.

    Attributes:
        notice: This host's stop notice.
        group: CPU process group of all ranks for small messages, which do not queue behind gradients; None for one
            rank.
        saved_at: When the last save was started, on the monotonic clock.
        poll: Processes the rows that are being exchanged, as `Agreement.poll` does.

    Args:
        context: This rank's context.
        config: The job's checkpoint section.
        numbers: How many numbers a `Row` has.
    """

    def __init__(self, context: Context, config: CheckpointConfig, numbers: int = 0) -> None:
        self.notice = StopNotice(ml_tree(os.environ))
        self.saved_at = time.monotonic()
        self._context = context
        self._config = config
        self._agreement = Agreement(context, flags=2, numbers=numbers)
        self.group = self._agreement.group
        self.poll = self._agreement.poll
        self._has_asked = False

    def decide(self, step: int, row: Row | None = None) -> BoundaryDecision:
        """Exchange flags and a row of numbers with the other ranks; return what all ranks do after this step."""
        must_stop, must_save = self._agreement.at_boundary(
            lambda: (self.notice.is_given, self._is_due_by_clock()), row
        )
        if must_save:
            # If this save fails, the clock requests another one.
            self._has_asked = False
        every = self._config.every_steps
        is_due_by_step = every is not None and step % every == 0
        return BoundaryDecision(save=must_save or is_due_by_step, stop=must_stop)

    def _is_due_by_clock(self) -> bool:
        """Return whether rank 0's clock requests a save: once per request, which takes a step to be agreed on."""
        seconds = self._config.every_seconds
        if seconds is None or not self._context.is_main or self._has_asked:
            return False
        self._has_asked = time.monotonic() - self.saved_at >= seconds
        return self._has_asked
