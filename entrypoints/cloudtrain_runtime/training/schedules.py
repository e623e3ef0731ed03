"""Learning-rate schedules of the job, for a Task without its own."""

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
    """Return the schedule that the job names, or None for a constant rate.

    Args:
        optimizer: Its present learning rates are the highest.
        train: The job's train section, with schedule and warm-up.
        last_step: Returns the number of optimizer steps of the run, which a resume may change.

    Raises:
        JobError: the schedule depends on the last step, which is unknown.
    """
    if train.schedule == "constant" and train.warmup_steps == 0:
        return None
    if train.schedule != "constant" and last_step() is None:
        raise JobError(
            f"train.schedule: {train.schedule} needs train.steps, because the length of this data is unknown"
        )
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, train, last_step() or 0))


def learning_rate_factor(step: int, train: TrainConfig, last_step: int) -> float:
    """Return the factor of the learning rate for the optimizer step after `step` steps.

    The factor rises linearly over `warmup_steps`, the last of which has the full rate, and then falls to zero after the
    last step of the run: linearly, or as half a cosine wave.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    done = min((step - train.warmup_steps) / max(last_step - train.warmup_steps, 1), 1.0)
    return 1.0 - done if train.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
