"""The checkpoints of one run: when to save, what to save and what to resume from.

A folder `step-00000500/` holds the files of torch.distributed.checkpoint (each rank's shards, and `.metadata`), the
identity of its writer (`writer.json`), and `manifest.json`, which is written last. Without a manifest that matches the
files, a checkpoint does not exist.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.checkpoint.listing import CheckpointRecord
from cloudtrain_runtime.checkpoint.loading import load_step, newest, resume
from cloudtrain_runtime.checkpoint.saving import CheckpointSaver
from cloudtrain_runtime.checkpoint.step_boundary import StepBoundary
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
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

LEAVE_SECONDS = 100.0
"""How long a rank that has failed, or a script after a stop notice, waits for a save in progress."""

_SHORT_SECONDS = 2.0
"""How long such a rank waits before it says so."""


@dataclass(frozen=True)
class Resumed:
    """What a run starts from.

    Attributes:
        step: Optimizer steps done; 0 for a new run.
        state: The `state` argument of the `save` call that wrote the checkpoint.
        uri: The checkpoint, or None for a new run.
        objects: The states of schedule and scaler.
        is_own: Whether the checkpoint is in the location that this run saves to.
        has_random: Whether the checkpoint holds the random states of this rank.
        run: The run that wrote the checkpoint.
        training: Identity of that run's training; empty if it is unknown.
        code: Digest of that run's code; empty if it is unknown.
        world_size: Number of ranks that wrote the checkpoint; 0 for a new run.
    """

    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    uri: str | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False
    has_random: bool = False
    run: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    world_size: int = 0


class CheckpointManager:
    """Saves and resumes one run. All ranks call every method together.

    Attributes:
        storage: Where this run saves.
        notice: This host's stop notice.
        group: CPU process group of all ranks for small messages; None for one rank.
        at_boundary: Returns what all ranks do at a step boundary, as `StepBoundary.decide` does.
        poll: Processes the rows that are being exchanged, as `Agreement.poll` does.

    Args:
        config: The job's checkpoint section. An empty uri means the host's /opt/ml/checkpoints.
        mesh: Size of each dimension of parallelism by name.
        numbers: How many numbers a `Row` has that `at_boundary` receives.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: Context,
        *,
        mesh: Mapping[str, int] | None = None,
        numbers: int = 0,
    ) -> None:
        self.storage = open_storage(_save_location(config, context))
        self._config = config
        self._context = context
        self._boundary = StepBoundary(context, config, numbers)
        self.notice = self._boundary.notice
        self.group = self._boundary.group
        self.at_boundary = self._boundary.decide
        self.poll = self._boundary.poll
        attempt = gather(secrets.token_hex(4), context, self.group)[0]
        mesh = mesh or {"data": context.world_size}
        self._saver = CheckpointSaver(
            storage=self.storage,
            context=context,
            attempt=attempt,
            group=self.group,
            notice=self.notice,
            keep=config.keep,
            mesh=mesh,
        )
        self.require_completed = self._saver.require_completed
        self._guarded: set[int] = set()

    def peek_state(self) -> Mapping[str, Any]:
        """Return the `state` of the checkpoint that `resume` will load, before the model exists."""
        found = newest(self._config, self.storage, self._context, [])
        return {} if found is None else found.content.state

    def resume(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        prepare: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Resumed:
        """Load the checkpoint to start from into model and optimizers, at any world size.

        Args:
            model: The model.
            optimizers: Its optimizers.
            prepare: Called with the `state` of a checkpoint before it is loaded; again if that one is damaged.

        Raises:
            CheckpointError: there is none where one was requested, or it belongs to another model.
        """
        optimizers = list(optimizers)
        check_saveable(model, optimizers)
        names: list[str] = []

        def states(record: CheckpointRecord) -> States:
            if prepare is not None:
                prepare(record.content.state)
            clear_optimizers(optimizers)
            values = collect_states(model, optimizers, {}, self._context)
            names[:] = parameter_names(values)
            return values

        found = resume(self._config, self.storage, self._context, states)
        if found is None:
            return Resumed()
        checkpoint, loaded, stepped = found
        own = rank_key(self._context.rank)
        has_random = self._context.rank < checkpoint.content.world_size
        if not has_random:
            # A rank without saved random states keeps its present ones.
            loaded["rng"][own] = b""
        with _naming_checkpoint(checkpoint.uri):
            objects = restore_states(loaded, model, optimizers, self._context, names)
        drop_unsaved_states(names, stepped, optimizers)
        self._boundary.saved_at = time.monotonic()
        is_own = checkpoint.location == self.storage.uri
        saved = checkpoint.content
        self._saver.last_step = saved.step if is_own else None
        return Resumed(
            step=saved.step,
            state=saved.state,
            uri=checkpoint.uri,
            objects=objects,
            is_own=is_own,
            has_random=has_random,
            run=saved.run,
            training=saved.training,
            code=saved.code,
            world_size=saved.world_size,
        )

    def load_weights(self, step: int, model: nn.Module, location: str = "") -> bool:
        """Load only the model of a step's checkpoint; return whether the checkpoint exists.

        `location` is the uri of the folder with the checkpoint; by default it is where this run saves.
        """
        storage = open_storage(location) if location else self.storage
        is_shared = bool(location) or self._config.resume == "auto"
        states = collect_model_state(model)
        if not load_step(storage, step, self._context, states, is_shared=is_shared):
            return False
        with _naming_checkpoint(f"{storage.uri}, step {step}"):
            restore_model(states, model)
        return True

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
        """Start to write a checkpoint; return whether it was started, with `wait` whether it is complete.

        Args:
            step: Optimizer steps done.
            model: The model, wrapped or not.
            optimizers: Its optimizers; their next steps wait until the copy is complete.
            state: JSON values for the manifest: data position, early stopping.
            objects: Plain values: state of schedule and scaler, equal on all ranks.
            wait: Return when the checkpoint is complete or has failed.
        """
        optimizers = list(optimizers)
        new = [optimizer for optimizer in optimizers if id(optimizer) not in self._guarded]
        if new:
            check_saveable(model, optimizers)
        for optimizer in new:
            self._guarded.add(id(optimizer))
            self._saver.guard(optimizer)

        def states() -> tuple[States, frozenset[str]]:
            with without_state_creation(optimizers):
                values = collect_states(model, optimizers, objects, self._context)
            return values, unshared_names(values, model)

        self._boundary.saved_at = time.monotonic()
        is_started = self._saver.save(step, states, state, wait=wait)
        if may_change_outside_steps(model, optimizers):
            # No hook runs before such a change.
            self._saver.wait_for_copy()
        return is_started

    @property
    def last_step(self) -> int | None:
        """Step of the newest complete checkpoint of this attempt, or of the one that it resumed from."""
        return self._saver.last_step

    def is_complete(self, step: int) -> bool:
        """Wait for the save in progress; return whether the newest complete checkpoint is that of this step."""
        self.wait_for_save()
        return self._saver.last_step == step

    def wait_for_save(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the save in progress; return whether it has ended.

        With a timeout this rank waits by itself, without it all ranks wait together.
        """
        if timeout_seconds is None:
            return self._saver.wait_for_save()
        return self._saver.wait_for_save_alone(timeout_seconds)

    def wait_after_failure(self) -> None:
        """Wait for the save in progress on a rank that has failed: the checkpoint needs this rank's part.

        The other ranks may not have noticed the failure: torchrun ends them after this rank has exited. If they have
        ended already, the save has failed, and this returns at once.
        """
        if not self._saver.is_busy or self.wait_for_save(_SHORT_SECONDS):
            return
        log_line(
            f"rank {self._context.rank} has failed; the save of step {self._saver.step_in_progress} is in progress:"
            f" waiting for it, at most {LEAVE_SECONDS:.0f} s"
        )
        self.wait_for_save(LEAVE_SECONDS)


def _save_location(config: CheckpointConfig, context: Context) -> str:
    """Return the uri or folder that all ranks save to."""
    is_local = config.uri in ("", str(context.checkpoint_dir))
    if is_local and len(context.hosts) > 1:
        raise CheckpointError(
            f"{context.checkpoint_dir} is a local disk of each host, so {len(context.hosts)} hosts cannot save one "
            "checkpoint there. What to do: save to S3 (cluster.network.isolation: false), or use one instance. Files "
            "that a script writes there itself are kept on every host"
        )
    return config.uri or str(context.checkpoint_dir)


@contextlib.contextmanager
def _naming_checkpoint(uri: str) -> Iterator[None]:
    """Add the checkpoint's uri to errors that are raised in this block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint {uri} cannot be read: {error}") from None
