"""Checkpoints for scripts: `load`, `save` and `should_stop`, as the package's docstring shows them.

Call `save` after each step. It writes a checkpoint when the job's `checkpoint.every` is due, while training continues.
After a stop notice it writes one immediately and returns when the checkpoint is complete.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cloudtrain_runtime.checkpoint.manager import LEAVE_SECONDS, CheckpointManager, Resumed
from cloudtrain_runtime.checkpoint.optimizer_options import (
    SETTINGS,
    Texts,
    describe_options,
    option_differences,
)
from cloudtrain_runtime.checkpoint.safe_metadata import check_serializable
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets_of_script
from cloudtrain_runtime.distributed.replica_check import ScriptReplicaCheck
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import read_run_config
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.rehearsal import Rehearsal
from cloudtrain_runtime.process.run_context import context

__all__ = ["Resumed", "finish_script", "load", "save", "should_stop"]

_FINISH_SECONDS = 3600.0
"""How long a script that has ended normally waits for a save in progress."""


def load(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    sampler: Any = None,
    **objects: Any,
) -> Resumed:
    """Load the newest complete checkpoint, if there is one; return what to start from.

    On CPUs it also fixes the order in which DistributedDataParallel sums gradients, by one backward pass of zeros, so
    that a resumed run repeats the same bits. That requires the wrapped model.

    Args:
        model: Plain or wrapped by DistributedDataParallel or fully_shard.
        optimizer: Its optimizer, or several; plain or in the wrapper of Accelerate or Lightning.
        sampler: The position of the run in its data: a GlobalOrderSampler, or any object with `state_dict` (JSON
            values) and `load_state_dict`.
        **objects: Other objects with both methods: `scheduler=`, `scaler=`, under the same names as for `save`.

    Raises:
        CheckpointError: `checkpoint.resume` names a location without a complete checkpoint, or the checkpoint belongs
            to another model.
    """
    script = _current_script()
    fix_buckets_of_script(model)
    optimizers = _optimizers(optimizer)
    script.settings = [describe_options(each) for each in optimizers]
    resumed = script.checkpoints.resume(model, optimizers)
    if script.context.is_main:
        _name_unused_options(resumed.objects.get(SETTINGS, []), script.settings)
    position = resumed.state.get("sampler")
    if sampler is not None and position is not None:
        sampler.load_state_dict(position)
    for name, stateful in objects.items():
        if stateful is not None and name in resumed.objects:
            stateful.load_state_dict(resumed.objects[name])
    script.context.progress.step = resumed.step
    script.saved_step = resumed.step if resumed.is_own else -1
    return replace(resumed, state=resumed.state.get("script", {}), objects={})


def save(
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    sampler: Any = None,
    state: Mapping[str, Any] | None = None,
    force: bool = False,
    **objects: Any,
) -> bool:
    """Save a checkpoint when one is due; return whether a save was started. All ranks call it after each step.

    A checkpoint is due when the job's `checkpoint.every` has passed, after a stop notice (this call then returns when
    the checkpoint is complete), and with `force`.

    Args:
        step: Optimizer steps done.
        model: As for `load`.
        optimizer: As for `load`.
        sampler: As for `load`.
        state: JSON values, equal on all ranks, that `load` returns again.
        force: Save now, and return when the checkpoint is complete: at the end of training.
        **objects: As for `load`; equal on all ranks.
    """
    script = _current_script()
    script.context.progress.step = step
    if not script.is_checked:
        check_serializable(
            {name: each.state_dict() for name, each in objects.items() if each is not None}
        )
        script.is_checked = True
    heartbeat.tick(step)
    script.rehearsal.at_step(step, lambda: script.checkpoints.notice.is_given)
    decision = script.checkpoints.at_boundary(step)
    if decision.stop:
        script.report_stop(step)
    script.is_stopping = decision.stop or script.rehearsal.is_over(step)
    wait = script.is_stopping or force
    if not (decision.save or wait):
        return False
    if step == script.saved_step and (not wait or script.checkpoints.is_complete(step)):
        return False
    if script.context.world_size > 1:
        script.replicas.warn(model, step)
    object_states = {name: each.state_dict() for name, each in objects.items() if each is not None}
    position = sampler.state_dict() if sampler is not None else None
    if script.settings:
        object_states[SETTINGS] = script.settings
    manifest_state = {"script": dict(state or {}), "sampler": position}
    is_started = script.checkpoints.save(
        step, model, _optimizers(optimizer), manifest_state, object_states, wait=wait
    )
    if is_started:
        script.saved_step = step
    return is_started


def should_stop() -> bool:
    """Return whether all ranks have agreed to stop at this step, after a stop notice. All ranks call it.

    After `save` it returns what `save` agreed on; without `save` the ranks agree here.
    """
    script = _current_script()
    if script.is_stopping is not None:
        return script.is_stopping
    step = script.context.step
    must_stop = script.checkpoints.at_boundary(step).stop
    if must_stop:
        script.report_stop(step)
    return must_stop


def finish_script() -> None:
    """Wait for the save in progress of a script that has ended without an error.

    Raises:
        CheckpointError: no checkpoint that was due was completed.
    """
    if _script is not None:
        _script.finish()
        if not _script.checkpoints.notice.is_given:
            _script.checkpoints.require_completed()


class _Script:
    """State that the functions of this module share."""

    def __init__(self) -> None:
        self.context = context()
        if self.context.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                "checkpoints of several ranks need a process group: call torch.distributed.init_process_group "
                "(or let Lightning or Accelerate call it) before cloudtrain_runtime.checkpoint"
            )
        config = read_run_config(os.environ)
        # Outside of a job: a checkpoint every 10 minutes, of which the last 3 are kept.
        checkpoint = CheckpointConfig(
            uri="", every_seconds=600.0, every_steps=None, keep=3, resume="auto"
        )
        if config is not None:
            checkpoint = config.checkpoint
        self.checkpoints = CheckpointManager(checkpoint, self.context)
        self.checkpoints.notice.start()
        self.rehearsal = Rehearsal(os.environ, self.context.rank)
        self.replicas = ScriptReplicaCheck(self.context)
        self.is_stopping: bool | None = None
        self.saved_step = -1
        self.is_checked = False
        # The options of the optimizers, before `load` has loaded them.
        self.settings: list[list[Texts]] = []
        # Before thread pools, which uploads to S3 need, are shut down; `atexit` runs its functions
        # after that.
        getattr(threading, "_register_atexit", atexit.register)(self._on_exit)
        _call_before_group_destruction(self.finish)

    def report_stop(self, step: int) -> None:
        """Record that the script ends before its last step."""
        self.checkpoints.notice.report(step, is_main=self.context.is_main)

    def finish(self) -> None:
        """Wait for the save in progress, for a time that depends on how the script ends."""
        is_failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        # After a failure the other ranks may have ended, and torchrun waits for this rank before it
        # restarts them.
        has_little_time = is_failing or self.checkpoints.notice.is_given
        limit_seconds = LEAVE_SECONDS if has_little_time else _FINISH_SECONDS
        if not self.checkpoints.wait_for_save(limit_seconds) and self.context.is_main:
            log_line(
                f"the checkpoint of step {self.saved_step} is abandoned: it took longer than {limit_seconds:.0f} s"
            )

    def _on_exit(self) -> None:
        self.checkpoints.notice.stop()
        self.finish()


_script: _Script | None = None


def _current_script() -> _Script:
    global _script  # noqa: PLW0603 (one process has one run)
    if _script is None:
        _script = _Script()
    return _script


def _name_unused_options(saved: Sequence[Sequence[Texts]], own: Sequence[Sequence[Texts]]) -> None:
    """Log which options of the script's optimizers the checkpoint has replaced by other ones."""
    for before, now in zip(saved, own, strict=False):
        for text in option_differences(before, now):
            log_line(
                f"warning: {text} in the script: the checkpoint's value is used. To use the new one, set it in "
                "optimizer.param_groups after checkpoint.load, and in the scheduler"
            )


def _optimizers(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return [_unwrap(optimizer)]
    return [_unwrap(each) for each in optimizer]


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that performs the steps: the wrappers of Accelerate and Lightning do not run its hooks."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return _unwrap(inner)
    return optimizer


def _call_before_group_destruction(function: Callable[[], Any]) -> None:
    """Call a function before the script destroys its process groups: a save in progress needs its own group."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def call_and_destroy(*args: Any, **kwargs: Any) -> Any:
        function()
        return destroy(*args, **kwargs)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = call_and_destroy
