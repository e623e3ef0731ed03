"""Lightning: `attach(trainer)` connects a Trainer with the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets_of_script
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.integrations.checkpoint_folder import CheckpointFolder
from cloudtrain_runtime.integrations.data_position import DataPosition
from cloudtrain_runtime.integrations.run_control import (
    RunControl,
    report_values,
    without_training_prefix,
    without_validation_prefix,
)
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import read_run_config
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context, context

__all__ = ["RunCallback", "attach"]

_FILE = "trainer.ckpt"
_MODELS = "lightning"


def attach(trainer: pl.Trainer) -> RunCallback:
    """Connect a Trainer with the run; call it before `trainer.fit`. Outside of a run it does nothing.

    The run then shows the trainer's progress and metrics. It saves checkpoints of Lightning's format below
    `context().checkpoint_dir` when the job's `checkpoint.every` says so and at the end, keeps `checkpoint.keep` of
    them, saves and ends `fit` after a stop notice, and continues from the newest complete checkpoint. Files of a
    ModelCheckpoint without a `dirpath` go to the folder `lightning` there.

    Args:
        trainer: The Trainer. All ranks call this.

    Returns:
        The callback that was added; its `is_stopped` says whether `fit` ended because of a stop notice.

    Raises:
        TypeError: it is no Trainer of the package `lightning`.
        ValueError: the Trainer is attached already.
    """
    _check_type(trainer)
    if any(isinstance(each, RunCallback) for each in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError("attach: this trainer is attached already. What to do: call attach once")
    callback = RunCallback()
    config = read_run_config(os.environ)
    if config is not None:
        callback.connect(trainer, context(), config)
    return callback


class RunCallback(Checkpoint):
    """The callback of `attach`. It derives from Checkpoint so that it runs after callbacks such as EarlyStopping.

    Attributes:
        is_stopped: Whether `fit` has ended early because of a stop notice.
        best_model_path: Empty: this callback does not select models.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self.best_model_path = ""

    def connect(self, trainer: pl.Trainer, place: Context, config: RunConfig) -> None:
        """Add this callback to a trainer of a run, and choose the checkpoint that `fit` continues from."""
        self._context, self._config = place, config.checkpoint
        self._folder = CheckpointFolder(place, config.checkpoint, is_copied=config.max_restarts > 0)
        self._position = DataPosition(place)
        self._exit = contextlib.ExitStack()
        self._saving: dict[str, Any] = {}
        self._shown: dict[str, torch.Tensor] = {}
        self._start = max(self._folder.complete_steps(), default=0)
        if self._start:
            trainer.ckpt_path = self._folder.path(self._start) / _FILE
        for each in trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint) and each.dirpath is None:
                each.dirpath = str(place.checkpoint_dir / _MODELS)
        trainer.callbacks.append(self)  # type: ignore[attr-defined] # the list is documented, but not declared

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Agree with the other ranks on the checkpoint, and follow the position in the training data."""
        if stage != "fit":
            return
        if self._start and trainer.ckpt_path != self._folder.path(self._start) / _FILE:
            raise CheckpointError(
                f"fit(ckpt_path=...) would start from {trainer.ckpt_path} again, although this run has a checkpoint of "
                f"step {self._start}. What to do: set trainer.ckpt_path before attach(trainer) instead"
            )
        control = self._control = RunControl(self._context, self._config)
        starts = gather(self._start, self._context, control.group)
        if len(set(starts)) > 1:
            raise CheckpointError(
                f"the hosts have different newest checkpoints (steps {sorted(set(starts))}): the run failed while it "
                "saved one. What to do: cloudtrain resume, which starts with all files on every host"
            )
        self._folder.group = control.group
        self._folder.prepare(self._start)
        self._step, self._is_due, self._is_stopping = self._start, False, False
        self._callbacks: list[pl.Callback] | None = None
        strategy, process = trainer.strategy, trainer.strategy.process_dataloader

        def process_and_follow(dataloader: object) -> object:
            processed = process(dataloader)
            return self._position.follow(processed) if trainer.training else processed

        vars(strategy)["process_dataloader"] = process_and_follow  # Lightning's hook for loaders
        self._exit.callback(vars(strategy).pop, "process_dataloader", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all ranks, for a checkpoint that this callback saves."""
        return self._saving

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move this rank to its position."""
        ranks = state_dict["ranks"]
        if len(ranks) == self._context.world_size:
            self._position.resume(ranks[self._context.rank])
        elif self._context.is_main:
            log_line(
                f"the checkpoint was saved by {len(ranks)} ranks, and this run has {self._context.world_size}: the "
                "order of samples in this epoch changes"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Receive stop notices from now on, in place of Lightning's handler of SIGTERM."""
        self._exit.enter_context(self._control.notice.handling_signals())
        fix_buckets_of_script(trainer.model or pl_module)
        self._total = _total_steps(trainer)
        self._position.settle()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the step; save and stop when all ranks do."""
        step = trainer.global_step
        if step == self._step or self.is_stopped:
            return  # a micro-step
        self._step = self._context.progress.step = step
        self._report_step(trainer, outputs)
        due = self._control.decide(step)
        self._is_due = self._is_due or due.save or step == self._total
        self._is_stopping = (self._is_stopping or due.stop) and step != self._total
        if trainer.is_last_batch:
            return  # first the epoch's validation
        if self._is_due and self._position.is_exact:
            self._save(trainer, trainer.current_epoch, batch_idx + 1)
        if self._is_stopping:
            self._stop_in_epoch(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save a checkpoint that was due at the epoch's last step, or for which the epoch had to end."""
        trainer.callbacks = self._callbacks or trainer.callbacks  # type: ignore[attr-defined] # as in `connect`
        # With max_steps, Lightning would repeat the end of an epoch that was saved there: the next step saves.
        is_next_step_better = (
            trainer.max_steps != -1 and self._position.is_exact and self._step != self._total
        )
        if not trainer.is_last_batch or is_next_step_better:
            return
        if self._is_due:
            self._save(trainer, trainer.current_epoch + 1, 0)
        if self._is_stopping:
            self._stop(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pause the detection of hangs, for a validation may take any time."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            heartbeat.pause()
            self._changed(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the metrics that the validation has logged."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            changed = self._changed(trainer)
            values = {
                f"validation/{without_validation_prefix(name)}": value
                for name, value in changed.items()
            }
            report_values(self._step, self._total, values)
            heartbeat.pause()  # until the next step

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give signals and loaders back to Lightning."""
        self._exit.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give signals and loaders back to Lightning; a later `fit` or `test` starts from the weights as they are."""
        if stage == "fit":
            self._exit.close()
            heartbeat.pause()  # what the script does now may take any time
            trainer.ckpt_path, self._start = None, 0

    def _report_step(self, trainer: pl.Trainer, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        values: dict[str, Any] = {}
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # an argument of the Trainer
        if self._step % max(1, interval) == 0:
            values |= {
                without_training_prefix(name): value
                for name, value in self._changed(trainer).items()
            }
        if trainer.optimizers:
            values["learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        if isinstance(loss, torch.Tensor):
            values["loss"] = loss * trainer.accumulate_grad_batches  # Lightning divides it
        report_values(self._step, self._total, values)

    def _changed(self, trainer: pl.Trainer) -> dict[str, torch.Tensor]:
        """Return the logged metrics that are new since the last call."""
        metrics = dict(trainer.callback_metrics)
        changed = {
            name: value for name, value in metrics.items() if self._shown.get(name) is not value
        }
        self._shown = metrics
        return changed

    def _stop(self, trainer: pl.Trainer) -> None:
        self.is_stopped = trainer.should_stop = True
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None

    def _stop_in_epoch(self, trainer: pl.Trainer) -> None:
        """End `fit` after this step, without what belongs to the end of an epoch.

        Lightning would run a validation, which may take longer than the time after a stop notice, and callbacks such as
        EarlyStopping, which may need its metrics.
        """
        self._stop(trainer)
        self._exit.callback(setattr, trainer, "limit_val_batches", trainer.limit_val_batches)
        trainer.limit_val_batches = 0
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined] # as in `connect`
        trainer.callbacks = [self]  # type: ignore[attr-defined]
        if self._is_due:
            self._is_due = False
            log_line(
                "stopped in an epoch whose loaders have no position: the run resumes from an earlier checkpoint"
            )

    def _save(self, trainer: pl.Trainer, epoch: int, batches: int) -> None:
        heartbeat.pause()
        self._is_due = False
        self._folder.begin(self._step)
        own = self._position.state(epoch, batches)
        self._saving = {"ranks": gather(own, self._context, self._control.group)}
        try:
            trainer.save_checkpoint(self._folder.path(self._step) / _FILE)
        finally:
            self._saving = {}
        self._folder.finish(self._step)


def _check_type(trainer: object) -> None:
    if not isinstance(trainer, pl.Trainer):
        kind = type(trainer)
        raise TypeError(
            f"attach: expected a lightning.Trainer, got {kind.__module__}.{kind.__qualname__}. What to do: pass the "
            "trainer itself; with pytorch_lightning, write `import lightning.pytorch as pl` instead"
        )


def _total_steps(trainer: pl.Trainer) -> int | None:
    """Return the optimizer steps of the whole run, or None where they are unknown."""
    if (
        not trainer.lightning_module.automatic_optimization
    ):  # the module decides how many steps a batch has
        return trainer.max_steps if trainer.max_steps > 0 else None
    total = trainer.estimated_stepping_batches
    return int(total) if total != float("inf") else None
