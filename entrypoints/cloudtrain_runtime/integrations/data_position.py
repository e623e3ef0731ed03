"""The position of a run in a plain DataLoader, and the random states with which its order is repeated.

An epoch's order depends on the random states at its start. A resumed run sets them, draws the order again, skips the
batches that are done, and then sets the random states of the moment of the save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from cloudtrain_runtime.checkpoint.training_state import random_states, set_random_states
from cloudtrain_runtime.process.run_context import Context


class DataPosition:
    """Follows one training loader, and moves it to the position of a checkpoint.

    Args:
        context: This rank's context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loaders = 0
        self._has_started = False
        self._is_followed = True
        self._start: dict[str, Any] = {}
        self._loader: DataLoader[Any] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._settled: dict[str, Any] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether a position in the middle of an epoch can be resumed exactly."""
        return self._is_followed and self._loaders <= 1

    def follow(self, loader: object) -> object:
        """Return a training loader that starts each epoch through this object.

        A DataLoader gets a subclass as its class, so it stays what it is for everyone else. A loader with `state_dict`
        and `load_state_dict` stays as it is: the framework restores its position.
        """
        self._loaders = (
            1 if self._has_started else self._loaders + 1
        )  # the framework may reload it for each epoch
        self._has_started = False
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return loader
        if not isinstance(loader, DataLoader):
            self._is_followed = False
        elif not getattr(loader, "is_followed", False):
            position, base = self, type(loader)

            class Followed(base):  # type: ignore[misc, valid-type]
                is_followed = True

                def __iter__(self) -> Iterator[Any]:
                    return position._iterate(self, super().__iter__)

            Followed.__name__, Followed.__qualname__ = base.__name__, base.__qualname__
            loader.__class__ = Followed
        return loader

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the position: plain values and tensors.

        Args:
            epoch: Index of the epoch.
            batches: Number of its batches that are done.
        """
        is_reused = self._loader is not None and self._loader.persistent_workers
        start = self._start if batches else {**self._states(), "is_reused": is_reused}
        return {
            "epoch": epoch,
            "batches": batches,
            "start": start,
            "now": random_states(self._context),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Move the loader to a position when its next epoch starts."""
        self._resumed, self._settled = state, state["now"]

    def settle(self) -> None:
        """Set the random states to those of the position, just before the first batch: hooks may have drawn numbers."""
        if self._settled is not None:
            set_random_states(self._settled, self._context)
            self._settled = None

    def _iterate(
        self, loader: DataLoader[Any], start: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        is_reused = loader.persistent_workers and self._loader is loader
        self._loader, self._has_started = loader, True
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._start = {**self._states(), "is_reused": is_reused}
            return start()
        for sampler in _samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(
                    resumed["epoch"]
                )  # the framework does it too late for loaders with workers
        self._start = dict(resumed["start"])
        self._set_start()
        # Persistent workers draw a seed when they are started, which is not in this epoch of the uninterrupted run.
        iterator = _skip(
            loader, start, resumed["batches"], self._set_start if self._start["is_reused"] else None
        )
        if resumed["batches"] == 0:
            self._settled = random_states(self._context)
        return iterator

    def _set_start(self) -> None:
        """Set all random states to those at the start of the epoch."""
        set_random_states(self._start["random"], self._context)
        if self._loader is not None:
            for generator, state in zip(
                _generators(self._loader), self._start["generators"], strict=False
            ):
                generator.set_state(state)

    def _states(self) -> dict[str, Any]:
        generators = (
            [] if self._loader is None else [each.get_state() for each in _generators(self._loader)]
        )
        return {"random": random_states(self._context), "generators": generators}


def _skip(
    loader: DataLoader[Any],
    start: Callable[[], Iterator[Any]],
    batches: int,
    before: Callable[[], None] | None,
) -> Iterator[Any]:
    """Start an epoch of a loader after its first batches.

    Args:
        loader: The loader.
        start: Starts an epoch from its beginning.
        batches: Number of batches that are left out.
        before: Called before the order is drawn.
    """
    if isinstance(loader.dataset, IterableDataset):
        iterator = start()
        for _ in range(batches):
            next(iterator, None)
        return iterator
    # The iterator that the loader creates now draws its first elements without loading their samples.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    skipping = _SkippingSampler(sampler, batches, before)
    # DataLoader refuses a plain assignment, which would not affect an iterator that exists.
    object.__setattr__(loader, name, skipping)
    try:
        iterator = start()
        if skipping.newest is not None:
            skipping.newest.skip()
    finally:
        object.__setattr__(loader, name, sampler)
        skipping.count, skipping.before = (
            0,
            None,
        )  # loaders with persistent workers iterate it again
    return iterator


class _SkippingSampler:
    """A sampler that leaves out its first elements.

    A loader may iterate it several times before it draws the first element, which draws the order of all.
    """

    def __init__(self, sampler: Any, count: int, before: Callable[[], None] | None) -> None:
        self.count, self.before = count, before
        self._sampler = sampler
        self.newest: _SkippingIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        self.newest = _SkippingIterator(iter(self._sampler), self.count, self.before)
        return self.newest

    def __len__(self) -> int:
        return len(self._sampler)


class _SkippingIterator:
    def __init__(
        self, iterator: Iterator[Any], count: int, before: Callable[[], None] | None
    ) -> None:
        self._iterator, self._count, self._before = iterator, count, before

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Draw the elements that are left out."""
        before, self._before = self._before, None
        if before is not None:
            before()
        while self._count:
            self._count -= 1
            next(self._iterator, None)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    # Accelerate puts the batch sampler into another one, which chooses the batches of a rank.
    inner = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    found = [loader.sampler, loader.batch_sampler, inner, getattr(inner, "sampler", None)]
    return [
        each for index, each in enumerate(found) if each is not None and each not in found[:index]
    ]


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, without the global ones."""
    found = [
        loader.generator,
        *(getattr(sampler, "generator", None) for sampler in _samplers(loader)),
    ]
    return [
        each
        for index, each in enumerate(found)
        if isinstance(each, torch.Generator) and each not in found[:index]
    ]
