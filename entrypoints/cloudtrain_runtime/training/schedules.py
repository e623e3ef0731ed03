"""Learning-rate schedules: the Task's own, or that of the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from cloudtrain_runtime.contract import EarlyStopping, TrainConfig
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.task import Task, checked_schedule, location_of
from cloudtrain_runtime.training.best_checkpoint import LOWEST_LOSS, metric_value


def make_schedule(
    task: Task,
    optimizer: Optimizer,
    train: TrainConfig,
    splits: Iterable[str],
    last_step: Callable[[], int | None],
) -> LRScheduler | None:
    """Return the Task's schedule, or else the one that the job names (see `default_schedule`).

    Raises:
        TaskError: the Task's schedule waits for a metric that there is not, or that improves the other way.
    """
    own = checked_schedule(task, optimizer)
    if isinstance(own, ReduceLROnPlateau):
        rule = train.early_stopping or LOWEST_LOSS
        wrong = ""
        if "validation" not in splits:
            wrong = "needs a validation split, and datasets() has none"
        elif own.mode != rule.mode:
            wrong = f"follows {rule.metric}: expected mode={rule.mode!r}, got {own.mode!r}"
        if wrong:
            raise TaskError(
                f"{location_of(type(task), 'schedule')}schedule(): ReduceLROnPlateau {wrong}"
            )
    return own or default_schedule(optimizer, train, last_step)


def step_metrics(optimizer: Optimizer, losses: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return what a step logs under names of the Task: each loss, and each group's rate where groups have own rates.

    Args:
        optimizer: The rate of a group is `learning_rate_NAME`, by the `name` of the group, or else its index.
        losses: Losses by name, where the Task has several optimizers.
    """
    found = {f"{name}_loss": float(value) for name, value in losses.items()}
    groups = optimizer.param_groups
    first_rates = {float(group.get("initial_lr", group["lr"])) for group in groups}
    if len(first_rates) > 1:
        for index, group in enumerate(groups):
            found[f"learning_rate_{group.get('name', index)}"] = float(group["lr"])
    return found


def advance(schedule: LRScheduler | None) -> None:
    """Advance a schedule after an optimizer step. A `ReduceLROnPlateau` advances after evaluations only."""
    if schedule is not None and not isinstance(schedule, ReduceLROnPlateau):
        schedule.step()


def advance_plateaus(
    schedules: Iterable[LRScheduler | None], rule: EarlyStopping | None, values: Mapping[str, float]
) -> None:
    """Advance each `ReduceLROnPlateau` with the metrics of an evaluation of the validation split."""
    for schedule in schedules:
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(metric_value((rule or LOWEST_LOSS).metric, values))


class JobSchedule(LambdaLR):
    """The schedule that the job names: a factor of the first rates, by the number of steps done."""

    def set_step(self, step: int) -> None:
        """Set the rates to those after a number of steps."""
        self.last_epoch = step
        for group, factor in zip(self.optimizer.param_groups, self.lr_lambdas, strict=True):
            first = group["initial_lr"]
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                rate.fill_(first * factor(step))
            else:
                group["lr"] = first * factor(step)


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
    return JobSchedule(optimizer, lambda step: learning_rate_factor(step, train, last_step() or 0))


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
    if train.schedule == "linear":
        return 1.0 - done
    return (1.0 + math.cos(math.pi * done)) / 2.0
