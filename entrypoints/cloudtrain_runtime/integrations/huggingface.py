"""Transformers: `attach(trainer)` connects a Trainer, also one of TRL or another library, with the run."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from transformers import (  # type: ignore[import-not-found]  # an own environment has it
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets_of_script
from cloudtrain_runtime.integrations.checkpoint_folder import CheckpointFolder
from cloudtrain_runtime.integrations.run_control import RunControl, report_values
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import read_run_config
from cloudtrain_runtime.process.run_context import Context, context

__all__ = ["RunCallback", "attach"]

_SPLITS = {"eval_": "validation/", "test_": "test/"}
"""Prefixes of what the trainer logs after an evaluation: the default, and that for a test."""
_SUMMARIES = ("train_", "epoch", "total_flos")
_TIMES = ("_runtime", "_samples_per_second", "_steps_per_second", "_preparation_time")
"""What the trainer logs besides metrics: sums at the end, and times of evaluations."""


def attach(trainer: Trainer) -> RunCallback:
    """Connect a Trainer with the run; call it before `trainer.train`. Outside of a run it does nothing.

    The run then shows the trainer's progress and what it logs (`logging_steps`). `train` saves the trainer's
    checkpoints in `context().checkpoint_dir` when the job's `checkpoint.every` says so and at the end, keeps
    `checkpoint.keep` of them, saves and returns after a stop notice, and continues from the newest complete
    checkpoint. `output_dir`, `save_strategy` and `save_total_limit` are not used; with `load_best_model_at_end`
    the trainer's own saves stay, and the best one is kept.

    Args:
        trainer: The Trainer. All ranks call this.

    Returns:
        The callback that was added; its `is_stopped` says whether `train` ended because of a stop notice.

    Raises:
        TypeError: it is no Trainer of Transformers.
        ValueError: the Trainer is attached already.
    """
    if not isinstance(trainer, Trainer):
        kind = type(trainer)
        raise TypeError(
            f"attach: expected a transformers.Trainer or one that derives from it, got {kind.__module__}."
            f"{kind.__qualname__}. What to do: pass the trainer itself, before train()"
        )
    if any(isinstance(each, RunCallback) for each in trainer.callback_handler.callbacks):
        raise ValueError("attach: this trainer is attached already. What to do: call attach once")
    callback = RunCallback()
    config = read_run_config(os.environ)
    if config is not None:
        callback.connect(trainer, context(), config)
    return callback


class RunCallback(TrainerCallback):  # type: ignore[misc]  # of a library that has no types here
    """The callback of `attach`.

    Attributes:
        is_stopped: Whether `train` has ended early because of a stop notice.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self._has_begun = False

    def connect(self, trainer: Trainer, place: Context, config: RunConfig) -> None:
        """Add this callback to a trainer of a run, and let its `train` continue from the newest checkpoint."""
        self._trainer, self._context, self._config = trainer, place, config.checkpoint
        self._folder = CheckpointFolder(place, config.checkpoint, is_copied=config.max_restarts > 0)
        arguments = trainer.args
        arguments.output_dir = str(place.checkpoint_dir)
        arguments.save_total_limit = (
            None  # old checkpoints are deleted when the new one is complete
        )
        arguments.save_only_model = False
        if not arguments.load_best_model_at_end:
            arguments.save_strategy = type(arguments.save_strategy)("no")
        trainer.add_callback(self)
        trainer.train = functools.wraps(trainer.train)(
            functools.partial(self._train, trainer.train)
        )

    def _train(
        self, train: Any, resume_from_checkpoint: Any = None, *others: Any, **options: Any
    ) -> Any:
        """Call the trainer's `train`; the first call continues from the newest checkpoint of the run."""
        if self._has_begun:
            return train(resume_from_checkpoint, *others, **options)
        self._has_begun = True
        control = self._control = RunControl(self._context, self._config)
        self._folder.group = control.group
        newest = self._folder.newest_step()
        self._folder.prepare(newest or 0)
        given = None if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
        with control.notice.handling_signals():
            return train(str(self._folder.path(newest)) if newest else given, *others, **options)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Prepare the model for a resume that repeats the same sums."""
        fix_buckets_of_script(self._trainer.model_wrapped)

    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Report the step; save and stop when all ranks do."""
        step = self._context.progress.step = state.global_step
        report_values(step, state.max_steps, {})
        due = self._control.decide(step)
        control.should_save = control.should_save or due.save or step >= state.max_steps
        if due.stop:
            self.is_stopped = control.should_training_stop = True
        self._begin_save(step, control)
        self._prepare_pause(control)

    def on_epoch_end(
        self, _: Any, state: TrainerState, control: TrainerControl, **___: Any
    ) -> None:
        """Leave out what the trainer does after an epoch when the run stops."""
        if self.is_stopped:
            control.should_save = False
        self._begin_save(state.global_step, control)
        self._prepare_pause(control)

    def on_log(
        self,
        _: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Report the values that the trainer has logged."""
        values = {
            _metric_name(name): value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float)
            and not name.startswith(_SUMMARIES)
            and not name.endswith(_TIMES)
        }
        report_values(state.global_step, state.max_steps or None, values)  # 0 before `train`
        self._prepare_pause(control)

    def on_save(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Mark the checkpoint as complete, and delete old ones."""
        best = [] if state.best_model_checkpoint is None else [Path(state.best_model_checkpoint)]
        self._folder.finish(state.global_step, kept=best)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Pause the detection of hangs: what the script does now may take any time."""
        heartbeat.pause()

    def _begin_save(self, step: int, control: TrainerControl) -> None:
        if control.should_save:
            self._folder.begin(step)

    def _prepare_pause(self, control: TrainerControl) -> None:
        """Prepare for a save or an evaluation, which may take any time; a run that stops has none for evaluations."""
        if self.is_stopped:
            control.should_evaluate = False
        if control.should_save or control.should_evaluate:
            heartbeat.pause()


def _metric_name(name: str) -> str:
    prefix = next((each for each in _SPLITS if name.startswith(each)), "")
    return _SPLITS.get(prefix, "") + name.removeprefix(prefix)
