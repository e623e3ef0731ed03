"""What the ranks of a framework's training loop report, and when all of them save and stop."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.process_group import Agreement
from cloudtrain_runtime.process.progress_report import report
from cloudtrain_runtime.process.rehearsal import Rehearsal
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.stop_notice import StopNotice

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


class RunControl:
    """Decides for all ranks when to save and when to stop. All ranks create it and call `decide` together.

    Attributes:
        group: CPU process group of all ranks for small messages; None for one rank.

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
        self._context = context
        self._config = config
        self._agreement = Agreement(context, flags=2)
        self.group = self._agreement.group
        self._notice = StopNotice(ml_tree(os.environ))
        self._rehearsal = Rehearsal(os.environ, context.rank)
        self._saved_at = time.monotonic()

    def acting_on_notices(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: in its block the launcher sends no signal, because `decide` sees the notice."""
        return self._notice.handling_signals()

    def decide(self, step: int) -> tuple[bool, bool]:
        """Return whether all ranks save after this optimizer step, and whether they stop; a run that stops saves."""
        self._rehearsal.at_step(step, lambda: self._notice.is_given)
        must_stop, is_due = self._agreement.at_boundary(self._flags)
        if must_stop:
            self._notice.report(step, is_main=self._context.is_main)
        must_stop = must_stop or self._rehearsal.is_over(step)
        every = self._config.every_steps
        is_due = is_due or (every is not None and step % every == 0)
        if is_due:
            self._saved_at = time.monotonic()
        return is_due or must_stop, must_stop

    def _flags(self) -> tuple[bool, bool]:
        seconds = self._config.every_seconds
        is_due = (
            seconds is not None
            and self._context.is_main
            and time.monotonic() - self._saved_at >= seconds
        )
        if is_due:
            self._saved_at = (
                time.monotonic()
            )  # one request per save: the ranks read it a step later
        return self._notice.is_given, is_due
