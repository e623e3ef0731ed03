"""What the ranks of a framework's training loop report, and when all of them save and stop."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from cloudtrain_runtime.checkpoint.step_boundary import BoundaryDecision, StepBoundary
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.process_group import Row
from cloudtrain_runtime.process.progress_report import report
from cloudtrain_runtime.process.rehearsal import Rehearsal
from cloudtrain_runtime.process.run_context import Context

_TRAINING_PREFIX = re.compile(r"^(?:train|training)[/_](?=.)")
_VALIDATION_PREFIX = re.compile(r"^(?:validation|valid|val|eval)[/_](?=.)")


def without_training_prefix(name: str) -> str:
    """Return the name of a training metric without the prefix that says so, such as `train_`."""
    return _TRAINING_PREFIX.sub("", name)


def without_validation_prefix(name: str) -> str:
    """Return the name of a validation metric without the prefix that says so, such as `val_`."""
    return _VALIDATION_PREFIX.sub("", name)


def name_by_split(name: str) -> str:
    """Return a metric's name in the run: `loss` for `train_loss`, and `validation/loss` for `eval_loss`."""
    plain = without_validation_prefix(name)
    return f"validation/{plain}" if plain != name else without_training_prefix(name)


def report_values(step: int, total: int | None, values: Mapping[str, Any]) -> None:
    """Report a step and values by name. Values named `step` and `total`, which some scripts log, are metrics, too."""
    report(
        step,
        total,
        **{f"train/{name}" if name in ("step", "total") else name: values[name] for name in values},
    )


class RunControl(StepBoundary):
    """The boundary of a framework's steps, at which a rehearsal stops, too.

    Args:
        context: This rank's context.
        config: The job's checkpoint section.

    Raises:
        CheckpointError: there are several ranks and no process group.
    """

    def __init__(self, context: Context, config: CheckpointConfig) -> None:
        if context.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"this run has {context.world_size} ranks, but the trainer has not joined them to a process group: let "
                "it use all ranks (in Lightning devices= and num_nodes=), or set cluster.processes_per_instance: 1"
            )
        super().__init__(context, config)
        self._rehearsal = Rehearsal(os.environ, context.rank)

    def decide(self, step: int, row: Row | None = None) -> BoundaryDecision:
        """Return whether all ranks save after this optimizer step, and whether they stop; a run that stops saves."""
        self._rehearsal.at_step(step, lambda: self.notice.is_given)
        agreed = super().decide(step, row)
        if agreed.save:
            self.saved_at = time.monotonic()
        if agreed.stop:
            self.notice.report(step, is_main=self._context.is_main)
        must_stop = agreed.stop or self._rehearsal.is_over(step)
        return BoundaryDecision(save=agreed.save or must_stop, stop=must_stop)
