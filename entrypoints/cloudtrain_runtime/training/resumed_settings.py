"""Settings of optimizers and schedules, which a resumed run takes from its job where the job has changed.

Loading the state of an optimizer or of a schedule also loads its settings, such as the learning rate. So a checkpoint
records the settings with which its run had built them, and a resumed run compares that record with what it has built
itself. Equal settings leave the loaded state as it is, to the last bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cloudtrain_runtime.checkpoint.manager import Resumed
from cloudtrain_runtime.checkpoint.optimizer_options import (
    SETTINGS,
    Options,
    Texts,
    as_text,
    as_texts,
    changed_names,
    copy_value,
    describe_changes,
    group_options,
    option_differences,
)
from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.contract.training_identity import is_same_training
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.training.best_checkpoint import LOWEST_LOSS
from cloudtrain_runtime.training.schedules import JobSchedule

_RATE = "lr"
_FIRST_RATE = "initial_lr"


@dataclass(frozen=True)
class Record:
    """Settings in a checkpoint.

    Attributes:
        optimizers: Options of each group, by name of the optimizer.
        schedules: Settings of each optimizer's schedule.
        length: Optimizer steps of the run, at whose end the job's schedule ends; None if it is unknown.
        metric: Metric and mode of early stopping.
    """

    optimizers: Mapping[str, list[Texts]]
    schedules: Mapping[str, Texts] = field(default_factory=dict)
    length: int | None = None
    metric: list[str] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {
            "optimizers": dict(self.optimizers),
            "schedules": dict(self.schedules),
            "length": self.length,
            "metric": self.metric,
        }

    @classmethod
    def of_loaded(cls, optimizers: Mapping[str, Optimizer]) -> Record:
        """Return the record for a checkpoint that has none, because an earlier version saved it."""
        found = {}
        for name, optimizer in optimizers.items():
            groups = group_options(optimizer)
            for group in groups:
                # A schedule keeps the rate that it started with.
                group[_RATE] = group.pop(_FIRST_RATE, group.get(_RATE))
            found[name] = [as_texts(group) for group in groups]
        return cls(found)


class InitialSettings:
    """The settings with which this start of the run has built its optimizers and schedules.

    Args:
        optimizers: The optimizers by name, which have no schedules yet.
        train: The job's train section.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], train: TrainConfig) -> None:
        self._optimizers = optimizers
        self._train = train
        self._built = {name: group_options(each) for name, each in optimizers.items()}
        self._schedules: Mapping[str, LRScheduler | None] = {}
        self._scheduled = self._built
        self._states: dict[str, dict[str, Any]] = {}
        self._texts: dict[str, Texts] = {}

    def add_schedules(self, schedules: Mapping[str, LRScheduler | None]) -> None:
        """Add the schedules of the optimizers, before any step of them. They set the rates of the first step."""
        self._schedules = schedules
        self._scheduled = {name: group_options(each) for name, each in self._optimizers.items()}
        for name, schedule in schedules.items():
            if schedule is None or isinstance(schedule, JobSchedule):
                train = self._train
                found = {"kind": train.schedule, "warmup_steps": train.warmup_steps}
            else:
                self._states[name] = schedule.state_dict()
                found = {"kind": type(schedule).__name__, **self._states[name]}
            self._texts[name] = as_texts(found)

    def record(self, length: int | None) -> Record:
        """Return the settings for a checkpoint of a run with this number of steps."""
        rule = self._train.early_stopping or LOWEST_LOSS
        built = {
            name: [as_texts(group) for group in groups] for name, groups in self._built.items()
        }
        return Record(
            optimizers=built,
            schedules=self._texts,
            length=length,
            metric=[rule.metric, rule.mode],
        )

    def resume(
        self, found: Resumed, context: Context, *, step: int, length: int | None
    ) -> Iterator[str]:
        """Load the schedules, apply the settings that have changed, and yield notes for the user.

        Args:
            found: The checkpoint, whose states the optimizers have.
            context: This rank's context.
            step: Optimizer steps done.
            length: Optimizer steps of the run.
        """
        recorded = found.objects.get(SETTINGS)
        own = self.record(length)
        is_same_job = is_same_training(found.training, context.training)
        if recorded is not None:
            saved = Record(**recorded)
        elif is_same_job:
            saved = own
        else:
            saved = Record.of_loaded(self._optimizers)
        changes = list(_differences(saved, own))
        is_same = is_same_job and found.code == context.code
        if changes and is_same and found.world_size != context.world_size:
            # The run keeps its global batch, so it keeps the settings that fit this batch.
            for text in changes:
                yield f"{text} with another number of ranks: the checkpoint's value is used"
            saved = Record(
                optimizers=own.optimizers,
                schedules=own.schedules,
                length=saved.length,
                metric=saved.metric,
            )
            changes = []
        for name, optimizer in self._optimizers.items():
            states = found.objects["schedule"]
            # One optimizer without a name has its schedule's state itself, and no mapping of
            # states.
            state = states[name] if name else states
            self._resume_one(name, optimizer, saved, state, own, step)
        for text in changes:
            yield f"{text} from step {step} on"
        yield from self._unused(found.training, context.training, changes)

    def has_new_metric(self, found: Resumed) -> bool:
        """Return whether early stopping follows another metric than in the checkpoint."""
        recorded = found.objects.get(SETTINGS)
        return recorded is not None and recorded["metric"] != self.record(None).metric

    def _unused(
        self, saved: Mapping[str, Any], own: Mapping[str, Any], changes: list[str]
    ) -> Iterator[str]:
        """Yield a warning for each changed field that an optimizer or a schedule of the Task does not read."""
        before = saved.get("train", {})
        now = own.get("train", {})
        is_own_schedule = len(self._states) == len(self._schedules)
        unused = {
            "learning_rate": ("optimizer", not any(text.startswith("optim") for text in changes)),
            "schedule": ("schedule", is_own_schedule),
            "warmup": ("schedule", is_own_schedule),
        }
        for field_name, (method, is_unused) in unused.items():
            if is_unused and before.get(field_name) != now.get(field_name):
                yield (
                    f"warning: train.{field_name} has changed, and {method}() of the Task does not use it: "
                    "the value there counts"
                )

    def _resume_one(
        self, name: str, optimizer: Optimizer, saved: Record, state: Any, own: Record, step: int
    ) -> None:
        """Apply the settings of one optimizer and its schedule; `state` is the schedule's in the checkpoint."""
        schedule = self._schedules[name]
        before = saved.schedules.get(name, self._texts[name])
        now = self._texts[name]
        is_new_rate = self._apply_options(name, optimizer, saved.optimizers.get(name, []))
        is_new_schedule = bool(changed_names(before, now))
        if schedule is None:
            if is_new_rate or state is not None:
                # A schedule that the job no longer has may have lowered the rate.
                _set_rates(optimizer, self._built[name])
            return
        if isinstance(schedule, ReduceLROnPlateau) and _is_same_plateau(state, before, now):
            own_values = {key: self._states[name][key] for key in changed_names(before, now)}
            schedule.load_state_dict({**state, **own_values})
            if is_new_rate:
                _set_rates(optimizer, self._built[name])
            return
        if isinstance(schedule, JobSchedule):
            is_new_schedule = is_new_schedule or saved.length != own.length
        if state is not None and not is_new_rate and not is_new_schedule:
            schedule.load_state_dict(state)
            return
        for group, options in zip(optimizer.param_groups, self._scheduled[name], strict=True):
            group.update({key: copy_value(value) for key, value in options.items()})
        done = step if state is None else int(state.get("last_epoch", step))
        _advance(schedule, done)

    def _apply_options(self, name: str, optimizer: Optimizer, saved: list[Texts]) -> bool:
        """Set the options of the groups that have changed, except rates; return whether a rate has."""
        is_new_rate = False
        for index, group in enumerate(optimizer.param_groups):
            before = saved[index] if index < len(saved) else {}
            for key, value in self._built[name][index].items():
                if before.get(key, as_text(value)) == as_text(value):
                    # The checkpoint of another optimizer or version of PyTorch lacks some options.
                    group.setdefault(key, copy_value(value))
                elif key == _RATE:
                    is_new_rate = True
                else:
                    group[key] = copy_value(value)
        return is_new_rate


def _differences(saved: Record, own: Record) -> Iterator[str]:
    for name, groups in own.optimizers.items():
        what = f"optimizer {name}" if name else "optimizer"
        yield from option_differences(saved.optimizers.get(name, []), groups, what)
    for name, now in own.schedules.items():
        what = f"schedule of {name}" if name else "schedule"
        yield from describe_changes(saved.schedules.get(name, {}), now, what)


def _is_same_plateau(state: Any, before: Texts, now: Texts) -> bool:
    """Return whether a `ReduceLROnPlateau` may continue from the best value in the checkpoint."""
    return state is not None and not {"kind", "mode"} & {*changed_names(before, now)}


def _advance(schedule: LRScheduler, steps: int) -> None:
    """Advance a schedule that is at step 0."""
    if isinstance(schedule, JobSchedule):
        schedule.set_step(steps)
        return
    if isinstance(schedule, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        # PyTorch warns of a schedule that is ahead of its optimizer, as this one is on purpose.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            schedule.step()


def _set_rates(optimizer: Optimizer, built: list[Options]) -> None:
    for group, options in zip(optimizer.param_groups, built, strict=True):
        group[_RATE] = copy_value(options[_RATE])
