"""Accelerate: `attach(accelerator, model)` connects a training loop with the run."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.data_loader import (  # type: ignore[import-untyped]
    DataLoaderDispatcher,
    DataLoaderShard,
)
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from cloudtrain_runtime.checkpoint.training_state import random_states, set_random_states
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets_of_script
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.integrations.checkpoint_folder import CheckpointFolder
from cloudtrain_runtime.integrations.data_position import DataPosition
from cloudtrain_runtime.integrations.run_control import (
    RunControl,
    name_by_split,
    report_values,
)
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import read_run_config
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context, context

__all__ = ["Loop", "attach"]


def attach(accelerator: Accelerator, *models: nn.Module, total_steps: int | None = None) -> Loop:
    """Connect a training loop with the run, and load the newest complete checkpoint of the run.

    Call it after `accelerator.prepare` and `register_for_checkpointing`, and iterate the loop by what it returns:

        loop = attach(accelerator, model, total_steps=max_train_steps)
        for epoch in loop.epochs(num_epochs):
            for batch in loop.batches(train_loader):
                ...  # forward, accelerator.backward, optimizer.step, as before
            if loop.is_stopped:
                break
            ...  # evaluation

    Between optimizer steps the run then reports its progress, saves with `accelerator.save_state` below
    `context().checkpoint_dir` when the job's `checkpoint.every` says so and at the end, keeps `checkpoint.keep`
    of these checkpoints, and saves and ends both iterations after a stop notice. `accelerator.log` also reports
    to the run. Outside of a run the loop trains as without it.

    Args:
        accelerator: The Accelerator. All ranks call this.
        models: The models that `prepare` has returned.
        total_steps: Optimizer steps after which training ends; None for all batches of all epochs.

    Returns:
        The loop, at the epoch and step that training continues from.

    Raises:
        TypeError: It is no Accelerator, or there is no model.
        ValueError: The Accelerator names its checkpoints itself, or is attached already.
        CheckpointError: There are several ranks and no process group, or the checkpoint is another loop's.
    """
    _check(accelerator, models)
    loop = Loop(accelerator, total_steps)
    config = read_run_config(os.environ)
    if config is not None:
        loop.connect(models, context(), config)
    return loop


class Loop:
    """The epochs and batches of a training loop.

    Attributes:
        epoch: Index of the current epoch, or of the one that training continues in.
        step: Optimizer steps done so far, including those before a resume.
        is_stopped: Whether training has ended early because of a stop notice.
    """

    def __init__(self, accelerator: Accelerator, total_steps: int | None) -> None:
        self.epoch = self.step = 0
        self.is_stopped = False
        self._accelerator = accelerator
        self._total = total_steps
        self._run: _Run | None = None
        self._values: dict[str, Any] = {}
        self._has_batches = self._is_in_batch = False

    def connect(self, models: tuple[nn.Module, ...], place: Context, config: RunConfig) -> None:
        """Connect the loop with a run, and load its newest checkpoint."""
        run = self._run = _Run(self._accelerator, place, config)
        self.epoch, self.step = run.load()
        for model in models:
            fix_buckets_of_script(model)
        _report_logs(self._accelerator, self)
        _forbid_later_models(self._accelerator)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the training, as given to `attach`."""
        return self._total

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the index of each epoch that is left, until training ends or stops.

        Args:
            count: Number of epochs of the training; None for no limit but the total steps.
        """
        if self._run is None:
            yield from self._remaining(count)
            return
        with self._run.control.notice.handling_signals():
            yield from self._remaining(count)
            heartbeat.pause()  # what the script does now may take any time
            if not self.is_stopped:
                self._run.save_end(_Place(self.step, self.epoch))

    def _remaining(self, count: int | None) -> Iterator[int]:
        while self._is_left(count):
            self._has_batches = False
            yield self.epoch
            if self.is_stopped:
                return
            self.epoch += 1
            if self._is_in_batch:  # the script has left its loop over the batches by `break`
                self._finish_batch(self.epoch, batches=0, is_epoch_done=False)

    def _is_left(self, count: int | None) -> bool:
        is_over = count is not None and self.epoch >= count
        return not (is_over or self.is_stopped or self._is_complete())

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches that are left of an epoch, until its end, the last step or a stop.

        Each batch counts as done when the next one is asked for; the optimizer step counts where
        `accelerator.sync_gradients` is true then. Leaving the iteration with `break` ends the epoch.

        Args:
            loader: The training loader that `accelerator.prepare` has returned.

        Raises:
            TypeError: `prepare` has not returned it.
            ValueError: It is the second loader of the epoch.
        """
        _check_loader(loader)
        if self._has_batches:
            raise ValueError(
                "batches: an epoch has one training loader, and this is the second one. What to do: call batches once "
                "per epoch, and iterate loaders for evaluation as they are"
            )
        self._has_batches = True
        done = 0
        if self._run is not None:
            done, loader = self._run.start(loader, self.epoch)
        for batch in loader:
            # An error in the script's loop closes this generator, too, and must save nothing.
            self._is_in_batch = True
            if self._run is not None:
                self._run.settle()
            yield batch
            done += 1
            self._finish_batch(
                self.epoch, batches=done, is_epoch_done=bool(loader.end_of_dataloader)
            )
            if self.is_stopped or self._is_complete():
                break
        heartbeat.pause()  # an evaluation may take any time

    def report(self, **values: Any) -> None:
        """Report values by name: numbers, or tensors with one element.

        In the body of a batch they belong to the step that it ends, and elsewhere to the last step.
        """
        self._values |= values
        if not self._is_in_batch:
            self._report()

    def _report(self) -> None:
        values, self._values = self._values, {}
        if self._run is not None:
            report_values(self.step, self._total, values)

    def _is_complete(self) -> bool:
        return self._total is not None and self.step >= self._total

    def _finish_batch(self, epoch: int, *, batches: int, is_epoch_done: bool) -> None:
        """Count a batch whose body has ended; save and stop when all ranks do."""
        self._is_in_batch = False
        if not self._accelerator.sync_gradients:
            return  # a micro-step
        self.step += 1
        if self._run is None:
            return
        self._report()
        place = _Place(self.step, epoch, batches, is_epoch_done)
        self.is_stopped = self._run.at_step(place) and not self._is_complete()


@dataclass(frozen=True)
class _Place:
    """Where a loop is after an optimizer step: batches of the epoch that are done, and whether these are all."""

    step: int
    epoch: int
    batches: int = 0
    is_epoch_done: bool = False


class _Run:
    """What a loop does with its run: checkpoints, positions in the data and stop notices."""

    def __init__(self, accelerator: Accelerator, place: Context, config: RunConfig) -> None:
        self.control = RunControl(place, config.checkpoint)
        self._accelerator, self._context = accelerator, place
        self._folder = CheckpointFolder(place, config.checkpoint, is_copied=config.max_restarts > 0)
        self._folder.group = self.control.group
        self._position = _Position(place)
        self._state = _LoopState()
        self._saved_step = 0
        self._resumed: _Place | None = None
        self._is_exact = True
        self._random: Mapping[str, Any] | None = None
        accelerator.register_for_checkpointing(self._state)

    def load(self) -> tuple[int, int]:
        """Load the newest checkpoint; return the epoch and the step that training continues from."""
        newest = self._folder.newest_step()
        self._folder.prepare(newest or 0)
        if newest is None:
            return 0, 0
        self._accelerator.load_state(str(self._folder.path(newest)))
        found = self._state.content
        if found.get("step") != newest:
            raise CheckpointError(
                f"{self._folder.path(newest)} has no position of an attached loop of Accelerate. What to do: attach "
                "the library that has saved it, or start without it: checkpoint.resume=never"
            )
        self._saved_step = self._context.progress.step = newest
        ranks, count = found["ranks"], self._context.world_size
        batches = found["batches"] * len(ranks) // count
        self._resumed = _Place(newest, found["epoch"], batches, found["is_epoch_done"])
        if len(ranks) != count:
            self._log(
                f"the checkpoint was saved by {len(ranks)} ranks, and this run has {count}: the order of samples in "
                f"epoch {found['epoch']} changes, and random numbers do"
            )
        elif "start" in ranks[self._context.rank]:
            self._position.resume(ranks[self._context.rank])
        else:
            self._random = ranks[self._context.rank]["now"]
        return found["epoch"], newest

    def start(self, loader: Any, epoch: int) -> tuple[int, Any]:
        """Return the number of batches of an epoch that are done, and what gives the others."""
        resumed, self._resumed = self._resumed, None
        loader.set_epoch(epoch)
        is_followed = self._position.follow_loader(loader)
        if resumed is not None and resumed.is_epoch_done:  # only its evaluation is left
            self._position.go_to_end(loader)
            return resumed.batches, ()
        done = 0 if resumed is None else resumed.batches
        is_resuming = self._position.is_resuming(is_followed=is_followed)
        self._is_exact = is_followed and (is_resuming or not done)
        if not done or is_resuming or hasattr(loader.base_dataloader, "load_state_dict"):
            return done, loader  # the position is ours, or Accelerate has loaded it
        if not is_followed:
            self._log(
                f"the first {done} batches of epoch {epoch} are left out: the others are those of the run before only "
                "if each start of the data gives the same order"
            )
        return done, self._accelerator.skip_first_batches(loader, done)

    def settle(self) -> None:
        """Set the random states of a checkpoint before the first batch, where the position does not: loaders draw some."""
        if self._random is not None:
            set_random_states(self._random, self._context)
            self._random = None

    def at_step(self, place: _Place) -> bool:
        """Save if it is due; return whether all ranks stop."""
        self._context.progress.step = place.step
        due = self.control.decide(place.step)
        if due.save:
            self._save(place)
        return due.stop

    def save_end(self, place: _Place) -> None:
        """Save the end of the training, whose last evaluation is done."""
        if place.step > self._saved_step:
            self._save(place)

    def _save(self, place: _Place) -> None:
        heartbeat.pause()
        self._folder.begin(place.step)
        is_in_epoch = place.batches and not place.is_epoch_done
        own: dict[str, Any] = {"now": random_states(self._context)}
        if self._is_exact or not is_in_epoch:
            own = self._position.state(place.epoch, place.batches if is_in_epoch else 0)
        ranks = gather(own, self._context, self.control.group)
        self._state.content = {**dataclasses.asdict(place), "ranks": ranks}
        try:
            self._accelerator.save_state(str(self._folder.path(place.step)))
        finally:
            self._state.content = {}
        self._folder.finish(place.step)
        self._saved_step = place.step

    def _log(self, text: str) -> None:
        if self._context.is_main:
            log_line(text)


class _LoopState:
    """The position of a loop, which Accelerate saves and loads as it does with all registered objects."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class _Position(DataPosition):
    """The position in a loader that Accelerate reads one batch ahead.

    A batch that is loaded in this process may draw random numbers. So the states before the batch that has been read
    ahead belong to the position, besides those of the moment of the save.
    """

    def __init__(self, place: Context) -> None:
        super().__init__(place)
        self._before_batch: dict[str, Any] | None = None

    def follow_loader(self, loader: Any) -> bool:
        """Follow a prepared loader from its next epoch on; return whether its position can be resumed exactly."""
        base = loader.base_dataloader
        if not isinstance(loader, DataLoaderShard) or isinstance(base.dataset, IterableDataset):
            return False
        self.follow(base)
        return bool(getattr(base, "is_followed", False))

    def is_resuming(self, *, is_followed: bool) -> bool:
        """Return whether the next epoch starts at the position of a checkpoint; without a followed loader, forget it."""
        if not is_followed:
            self._resumed = None
        return self._resumed is not None

    def go_to_end(self, loader: Any) -> None:
        """Set random states to those at the end of an epoch of which nothing is left but its evaluation."""
        resumed, self._resumed, self._settled = self._resumed, None, None
        if resumed is not None:
            self._loader = loader.base_dataloader
            self._start = dict(resumed["start"])
            self._set_start()

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the position, with the random states before the batch that has been read ahead."""
        return {**super().state(epoch, batches), "before_batch": self._before_batch}

    def _iterate(
        self, loader: DataLoader[Any], start: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        resumed = self._resumed
        iterator = super()._iterate(loader, start)
        self._settled = None  # below, as soon as the batch is loaded that had been read ahead
        self._before_batch = None
        is_in_epoch = resumed is not None and resumed["batches"] > 0
        return self._read(loader, iterator, resumed if is_in_epoch else None)

    def _read(
        self, loader: DataLoader[Any], iterator: Iterator[Any], resumed: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        if resumed is not None and resumed["before_batch"] is not None:
            set_random_states(resumed["before_batch"], self._context)
        while True:
            if not loader.num_workers:
                self._before_batch = random_states(self._context)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                if resumed is not None:
                    set_random_states(resumed["now"], self._context)
                    resumed = None
            yield batch


def _check(accelerator: object, models: tuple[object, ...]) -> None:
    if not isinstance(accelerator, Accelerator):
        kind = type(accelerator)
        raise TypeError(
            f"attach: expected an accelerate.Accelerator, got {kind.__module__}.{kind.__qualname__}. What to do: pass "
            "the Accelerator, then the models that its prepare has returned"
        )
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise TypeError(
            "attach: expected the models that accelerator.prepare has returned. What to do: "
            "attach(accelerator, model)"
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "attach: ProjectConfiguration(automatic_checkpoint_naming=True) would save to a folder of its own. What to "
            "do: leave it out; the run names its checkpoints"
        )
    if getattr(accelerator.log, "is_attached", False):
        raise ValueError(
            "attach: this Accelerator is attached already. What to do: call attach once"
        )


def _check_loader(loader: object) -> None:
    # A prepared loader shows the class of the loader in it to isinstance.
    if not issubclass(type(loader), DataLoaderShard | DataLoaderDispatcher):
        kind = type(loader)
        raise TypeError(
            f"batches: expected a loader that accelerator.prepare has returned, got {kind.__module__}."
            f"{kind.__qualname__}. What to do: pass a torch DataLoader to prepare"
        )


def _report_logs(accelerator: Accelerator, loop: Loop) -> None:
    """Let `accelerator.log` report to the run, too."""
    log = accelerator.log

    @functools.wraps(log)
    def log_and_report(values: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        numbers = {
            name_by_split(name): value
            for name, value in values.items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        }
        loop.report(**numbers)
        return log(values, *arguments, **options)

    vars(log_and_report)["is_attached"] = True
    accelerator.log = log_and_report


def _forbid_later_models(accelerator: Accelerator) -> None:
    """Refuse to prepare what `attach` would have had to load."""
    prepare = accelerator.prepare

    @functools.wraps(prepare)
    def prepare_others(*objects: Any, **options: Any) -> Any:
        if any(isinstance(each, nn.Module | Optimizer) for each in objects):
            raise ValueError(
                "attach: a model or an optimizer is prepared after it, and would not continue from the checkpoint. "
                "What to do: call attach after prepare"
            )
        return prepare(*objects, **options)

    accelerator.prepare = prepare_others
