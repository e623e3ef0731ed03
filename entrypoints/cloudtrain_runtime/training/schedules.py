"""The learning rate of a Task that has no schedule of its own."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.errors import JobError


def default_schedule(
    optimizer: Optimizer, train: TrainConfig, last_step: Callable[[], int | None]
) -> LRScheduler | None:
    """Return the schedule that the job names, or None where the rate stays what it is.

    Args:
        optimizer: Its present rates are the highest.
        train: Says how the rate rises and falls.
        last_step: Tells the number of optimizer steps of the whole run, which a resume may change.

    Raises:
        JobError: nobody knows the last step, and the schedule falls towards it.
    """
    if train.schedule == "constant" and train.warmup_steps == 0:
        return None
    if train.schedule != "constant" and last_step() is None:
        raise JobError(
            f"train.schedule: {train.schedule} needs train.steps, because this data does not tell its length"
        )
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, train, last_step() or 0))


def learning_rate_factor(step: int, train: TrainConfig, last_step: int) -> float:
    """Return what share of the full rate the optimizer step after `step` others uses.

    It rises in a line over `warmup_steps`, the last of which has the full rate, and then falls to zero after the last
    step of the run: in a line, or as half a cosine wave.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    done = min((step - train.warmup_steps) / max(last_step - train.warmup_steps, 1), 1.0)
    return 1.0 - done if train.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
