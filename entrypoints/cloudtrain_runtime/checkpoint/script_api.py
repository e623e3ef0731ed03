"""Checkpoints: everything that a run needs to go on as if it had never stopped.

A script needs three calls:

    from cloudtrain_runtime import checkpoint

    start = checkpoint.load(model=model, optimizer=optimizer)
    for step in range(start.step + 1, total + 1):
        ...
        optimizer.step()
        checkpoint.save(step, model=model, optimizer=optimizer)
        if checkpoint.should_stop():
            break

`save` is called after each step and writes when the job's `checkpoint.every` says so, beside the steps that follow;
told to stop, it writes at once and returns when the checkpoint is complete.

A folder `step-00000500/` holds the files of torch.distributed.checkpoint (each rank's shards, and `.metadata`), who
writes it (`writer.json`), and `manifest.json`, written last. Without a manifest that fits the files, a checkpoint does
not exist.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cloudtrain_runtime.checkpoint.loading import load_step, peek_state, resume
from cloudtrain_runtime.checkpoint.safe_metadata import check_serializable
from cloudtrain_runtime.checkpoint.saving import CheckpointSaver, RetentionPolicy
from cloudtrain_runtime.checkpoint.storage import open_storage
from cloudtrain_runtime.checkpoint.training_state import (
    States,
    check_saveable,
    clear_optimizers,
    collect_model_state,
    collect_states,
    drop_unsaved_states,
    may_change_outside_steps,
    parameter_names,
    rank_key,
    restore_model,
    restore_states,
    unshared_names,
    without_state_creation,
)
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets_of_script
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import ml_tree, read_run_config
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import Agreement, Row, gather
from cloudtrain_runtime.process.run_context import Context, context
from cloudtrain_runtime.process.stop_notice import StopNotice

_LEAVE_SECONDS = 100.0
"""How long a rank that has failed, or a script that was told to stop, waits for a save under way."""

_FINISH_SECONDS = 3600.0
"""How long one does that has come to its end."""


@dataclass(frozen=True)
class Resumed:
    """What a run starts from.

    Attributes:
        step: Optimizer steps done; 0 for a new run.
        state: What was given to `save` as `state`.
        uri: The checkpoint, or None for a new run.
        objects: The states of schedule and scaler.
        is_own: Whether it lies where this run saves.
        has_random: Whether this rank's random states were in it.
    """

    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    uri: str | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False
    has_random: bool = False


@dataclass(frozen=True)
class BoundaryDecision:
    """What all ranks have agreed on at a step boundary."""

    save: bool
    stop: bool


class CheckpointManager:
    """The checkpoints of one run. Every method is called by all ranks together.

    Attributes:
        group: All ranks, for small messages on the CPU that do not queue behind gradients; None for one rank.

    Args:
        config: The job's checkpoint section. An empty uri is the host's /opt/ml/checkpoints.
        place: This rank's place.
        mesh: Size of each dimension of parallelism by name.
        numbers: How many numbers a row has that `at_boundary` is given.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        place: Context,
        *,
        mesh: Mapping[str, int] | None = None,
        numbers: int = 0,
    ) -> None:
        self.storage = open_storage(_place_to_save(config, place))
        self.notice = StopNotice(ml_tree(os.environ))
        self._config = config
        self._place = place
        self._agreement = Agreement(place, flags=2, numbers=numbers)
        self.group = self._agreement.group
        attempt = gather(secrets.token_hex(4), place, self._agreement.group)[0]
        keeping = RetentionPolicy(config.keep, mesh or {"data": place.world_size})
        group, notice = self._agreement.group, self.notice
        self._saver = CheckpointSaver(self.storage, keeping, place, attempt, group, lambda: notice.is_given)
        self._guarded: set[int] = set()
        self._has_asked = False

    # ------------------------------------------------------------ going on

    def peek_state(self) -> Mapping[str, Any]:
        """Return the `state` of the checkpoint that `resume` will start from, before there is a model."""
        return peek_state(self._config, self.storage, self._place)

    def resume(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Resumed:
        """Load the checkpoint to start from into model and optimizers; works at any world size.

        Raises:
            CheckpointError: there is none where one was asked for, or it is another model's.
        """
        optimizers = list(optimizers)
        check_saveable(model, optimizers)

        names: list[str] = []

        def states() -> States:
            clear_optimizers(optimizers)
            values = collect_states(model, optimizers, {}, self._place)
            names[:] = parameter_names(values)
            return values

        found = resume(self._config, self.storage, self._place, states)
        if found is None:
            return Resumed()
        checkpoint, loaded, stepped = found
        own = rank_key(self._place.rank)
        has_random = self._place.rank < checkpoint.manifest.world_size
        if not has_random:
            loaded["rng"][own] = b""  # the present states, which a rank without saved ones keeps
        with _naming_checkpoint(checkpoint.uri):
            objects = restore_states(loaded, model, optimizers, self._place, names)
        drop_unsaved_states(names, stepped, optimizers)
        self._saver.last_started_at = time.monotonic()
        is_own = checkpoint.place == self.storage.uri
        self._saver.last_step = checkpoint.step if is_own else None
        return Resumed(
            checkpoint.step,
            checkpoint.manifest.state,
            checkpoint.uri,
            objects,
            is_own=is_own,
            has_random=has_random,
        )

    def load_weights(self, step: int, model: nn.Module, place: str = "") -> bool:
        """Load the model alone from a checkpoint; return whether there is one.

        Args:
            step: Its step.
            model: In whatever it is wrapped.
            place: Uri of the folder that it lies in; by default where this run saves.
        """
        storage = open_storage(place) if place else self.storage
        is_shared = bool(place) or self._config.resume == "auto"
        states = collect_model_state(model)
        if not load_step(storage, step, self._place, states, is_shared=is_shared):
            return False
        with _naming_checkpoint(f"{storage.uri}, step {step}"):
            restore_model(states, model)
        return True

    # ------------------------------------------------------------ at each step

    def at_boundary(self, step: int, row: Row | None = None) -> BoundaryDecision:
        """Tell the others what this rank has seen; return what all ranks do at this boundary.

        Args:
            step: Optimizer steps done.
            row: Of this step, next to which those of all ranks are wanted.
        """
        must_stop, must_save = self._agreement.at_boundary(self._flags, row)
        if must_save:
            self._has_asked = False  # where nothing is saved now, the clock asks again
        every = self._config.every_steps
        return BoundaryDecision(save=must_save or (every is not None and step % every == 0), stop=must_stop)

    def poll(self, *, wait: bool = True) -> None:
        """Have the rows that are under way taken now; without `wait` only those that have come."""
        self._agreement.poll(wait=wait)

    def _flags(self) -> tuple[bool, bool]:
        return self.notice.is_given, self._is_due_by_clock()

    def _is_due_by_clock(self) -> bool:
        """Whether the clock of rank 0 says so. Asked once for each answer, which takes a step."""
        seconds = self._config.every_seconds
        if seconds is None or not self._place.is_main or self._has_asked:
            return False
        self._has_asked = time.monotonic() - self._saver.last_started_at >= seconds
        return self._has_asked

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        state: Mapping[str, Any],
        objects: Mapping[str, Any],
        *,
        wait: bool = False,
    ) -> bool:
        """Begin to write a checkpoint; return whether it was begun, with `wait` whether it is complete.

        Args:
            step: Optimizer steps done.
            model: The model, in whatever it is wrapped.
            optimizers: Its optimizers; their next steps wait until the copy is made.
            state: JSON values for the manifest: data position, early stopping.
            objects: Plain values: state of schedule and scaler, equal on all ranks.
            wait: Return when it is complete, or has failed.
        """
        optimizers = list(optimizers)
        if any(id(optimizer) not in self._guarded for optimizer in optimizers):
            check_saveable(model, optimizers)
        for optimizer in optimizers:
            if id(optimizer) not in self._guarded:
                self._guarded.add(id(optimizer))
                self._saver.guard(optimizer)

        def states() -> tuple[States, frozenset[str]]:
            with without_state_creation(optimizers):
                values = collect_states(model, optimizers, objects, self._place)
            return values, unshared_names(values, model)

        is_begun = self._saver.save(step, states, state, wait=wait)
        if may_change_outside_steps(model, optimizers):
            self._saver.wait_for_copy()  # nobody will tell when they change
        return is_begun

    @property
    def last_step(self) -> int | None:
        """Step of the newest complete checkpoint of this attempt, or the one that it resumed from."""
        return self._saver.last_step

    def is_complete(self, step: int) -> bool:
        """Wait for the save under way; return whether the newest checkpoint is the one of this step."""
        self.wait_for_save()
        return self._saver.last_step == step

    def wait_for_save(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the save under way; return whether none is any more.

        Args:
            timeout_seconds: How long this rank waits for itself. Without it all ranks wait together.
        """
        return (
            self._saver.wait_for_save() if timeout_seconds is None else self._saver.wait_for_save_alone(timeout_seconds)
        )

    def require_completed(self) -> None:
        """End a run that has completed none of the checkpoints that were due.

        Raises:
            CheckpointError: so it is.
        """
        self._saver.require_completed()

    def wait_after_failure(self) -> None:
        """Wait for the save under way in a rank that has failed: the others' parts are of no use without its own.

        They need not have noticed: torchrun ends them when this rank has left. Where they have gone, the save has
        failed, and nothing is waited for.
        """
        if self._saver.is_busy:
            under_way = f"the save of step {self._saver.step_in_progress} is under way"
            log_line(
                f"rank {self._place.rank} has failed; {under_way}, and is waited for {_LEAVE_SECONDS:.0f} s at most"
            )
            self.wait_for_save(_LEAVE_SECONDS)


def _place_to_save(config: CheckpointConfig, place: Context) -> str:
    """Return the uri, or the folder, that all ranks save to.

    Raises:
        CheckpointError: it is a folder that each host has for itself.
    """
    is_own = config.uri in ("", str(place.checkpoint_dir))
    if is_own and len(place.hosts) > 1:
        raise CheckpointError(
            f"{place.checkpoint_dir} is a disk of each host's own, so {len(place.hosts)} hosts cannot save one "
            "checkpoint there. What to do: save to S3 (cluster.network.isolation: false), or use one instance. Files "
            "that a script writes there by itself are kept, those of all hosts"
        )
    return config.uri or str(place.checkpoint_dir)


@contextlib.contextmanager
def _naming_checkpoint(checkpoint: str) -> Iterator[None]:
    """Say which checkpoint it is that holds what is not loaded."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint {checkpoint} cannot be read: {error}") from None


# ---------------------------------------------------------------- for scripts


class _Script:
    """The state behind the three calls."""

    def __init__(self) -> None:
        place = context()
        if place.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                "checkpoints of several ranks need their process group: call torch.distributed.init_process_group "
                "(or let Lightning or Accelerate do it) before cloudtrain_runtime.checkpoint"
            )
        config = read_run_config(os.environ)
        checkpoint = config.checkpoint if config else CheckpointConfig("", 600.0, None, 3, "auto")
        self.place = place
        self.checkpoints = CheckpointManager(checkpoint, place)
        self.checkpoints.notice.begin()
        self.is_stopping: bool | None = None
        self.saved_step = -1
        self.is_checked = False
        _before_threads_end(self._leave)
        _before_groups_end(self._finish)

    def _leave(self) -> None:
        self.checkpoints.notice.end()
        self._finish()

    def _finish(self) -> None:
        is_failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        # Of a run that has failed, other ranks may be gone, and torchrun waits for this one to start anew.
        limit = _LEAVE_SECONDS if is_failing or self.checkpoints.notice.is_given else _FINISH_SECONDS
        if not self.checkpoints.wait_for_save(limit) and self.place.is_main:
            log_line(f"the checkpoint of step {self.saved_step} is given up: it took longer than {limit:.0f} s")


def finish_script() -> None:
    """Wait for the save under way of a script that has ended without an error.

    Raises:
        CheckpointError: none of its checkpoints that were due was completed.
    """
    if _script is not None:
        _script._finish()  # noqa: SLF001 (of this module)
        if not _script.checkpoints.notice.is_given:
            _script.checkpoints.require_completed()


def _before_threads_end(act: Callable[[], Any]) -> None:
    """Call it when the script has ended. Exit handlers come too late: thread pools, which S3 needs, have ended then."""
    register = getattr(threading, "_register_atexit", atexit.register)
    register(act)


def _before_groups_end(act: Callable[[], Any]) -> None:
    """Call it before the script destroys its process groups: a save under way needs its own."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def settled(*args: Any, **kwargs: Any) -> Any:
        act()
        return destroy(*args, **kwargs)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = settled


_script: _Script | None = None


def _this_script() -> _Script:
    global _script  # noqa: PLW0603 (one process has one run)
    if _script is None:
        _script = _Script()
    return _script


def load(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    sampler: Any = None,
    **objects: Any,
) -> Resumed:
    """Load the newest whole checkpoint, if there is one; return what to start from.

    On CPUs it also fixes the order in which DistributedDataParallel sums gradients, by one backward pass of zeros, so
    that a resumed run repeats the same bits. For that it needs the wrapped model.

    Args:
        model: Plain or wrapped by DistributedDataParallel or fully_shard.
        optimizer: Its optimizer, or several; plain or in the wrapper of Accelerate or Lightning.
        sampler: Where the run stands in its data: a GlobalOrderSampler, or what else has `state_dict` (JSON values) and
            `load_state_dict`.
        **objects: What else has both: `scheduler=`, `scaler=`, under the names that `save` gets.

    Raises:
        CheckpointError: `checkpoint.resume` names a place without a complete checkpoint, or it is another model's.
    """
    script = _this_script()
    fix_buckets_of_script(model)
    resumed = script.checkpoints.resume(model, _several(optimizer))
    position = resumed.state.get("sampler")
    if sampler is not None and position is not None:
        sampler.load_state_dict(position)
    for name, thing in objects.items():
        if thing is not None and name in resumed.objects:
            thing.load_state_dict(resumed.objects[name])
    script.place.progress.step = resumed.step
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
    """Save when it is due; return whether a checkpoint was begun. Called by all ranks after each optimizer step.

    It is due when the job's `checkpoint.every` has passed, when the run was told to stop (then this returns when the
    checkpoint is complete), and with `force`.

    Args:
        step: Optimizer steps done.
        model: As for `load`.
        optimizer: As for `load`.
        sampler: As for `load`.
        state: JSON values, equal on all ranks, that `load` returns again.
        force: Save now, and return when the checkpoint is complete: at the end of training.
        **objects: As for `load`; equal on all ranks.
    """
    script = _this_script()
    script.place.progress.step = step
    if not script.is_checked:
        check_serializable({name: thing.state_dict() for name, thing in objects.items() if thing is not None})
        script.is_checked = True
    heartbeat.tick(step)
    due = script.checkpoints.at_boundary(step)
    script.is_stopping = due.stop
    wait = due.stop or force
    if not (due.save or wait):
        return False
    if step == script.saved_step and (not wait or script.checkpoints.is_complete(step)):
        return False
    held = {name: thing.state_dict() for name, thing in objects.items() if thing is not None}
    position = sampler.state_dict() if sampler is not None else None
    told = {"script": dict(state or {}), "sampler": position}
    is_begun = script.checkpoints.save(step, model, _several(optimizer), told, held, wait=wait)
    if is_begun:
        script.saved_step = step
    return is_begun


def should_stop() -> bool:
    """Whether the run was told to stop and all ranks have agreed to do so at this step. Called by all ranks.

    After `save` it tells what was agreed there; without, the ranks ask each other here.
    """
    script = _this_script()
    if script.is_stopping is None:
        return script.checkpoints.at_boundary(script.place.step).stop
    return script.is_stopping


def _several(optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [_unwrapped(each) for each in several]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that takes the steps: Accelerate's and Lightning's wrappers have no hooks of their own."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
