"""Feeder of the training loop: the micro-batches of each step on the device, and the position in the data."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from cloudtrain_runtime.data.loader import (
    NO_BATCH,
    PREFETCH,
    Collate,
    DevicePrefetcher,
    load_in_process,
    make_loader,
    worker_count,
)
from cloudtrain_runtime.data.position import DataState, GlobalBatch, MicroBatch, Position
from cloudtrain_runtime.data.samplers import GlobalOrderSampler
from cloudtrain_runtime.process.run_context import Context


@dataclass(frozen=True, slots=True)
class Step:
    """The samples of one optimizer step: `for micro, batch in step`, each batch on this rank's device.

    Attributes:
        plan: Number of samples of all ranks, and in each of this rank's micro-batches.
        batches: Iterator over this rank's micro-batches.
    """

    plan: GlobalBatch
    batches: Iterator[Any]

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        return zip(self.plan.micro_batches, self.batches, strict=False)


class Feeder(ABC):
    """The samples of one rank, step by step.

        while feeder.position.epoch < 3:
            for step in feeder.epoch():
                for micro, batch in step:
                    ...
                feeder.advance()

    Attributes:
        wait_seconds: Time spent waiting for batches so far; without workers, the time of loading.
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        data_rank: Index of this rank's share of the data.
        data_size: Number of shares of the data.
    """

    wait_seconds: float = 0.0
    batch_size: int
    accumulate: int
    data_rank: int
    data_size: int

    @property
    @abstractmethod
    def position(self) -> Position:
        """Steps, epochs and samples done, as counted by `advance`."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Samples of an epoch, or None if they are unknown before its end."""

    @property
    @abstractmethod
    def global_size(self) -> int:
        """Samples of a full optimizer step, of all ranks."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of a full epoch, or None if they are unknown before its end."""
        return None if self.length is None else -(-self.length // self.global_size)

    @abstractmethod
    def epoch(self) -> Iterator[Step]:
        """Return the remaining steps of the current epoch."""

    @abstractmethod
    def advance(self) -> None:
        """Count an optimizer step: move the position behind its samples, or to the start of the next epoch."""

    @abstractmethod
    def state(self) -> DataState:
        """Return the state for a checkpoint. All ranks call this together."""

    @abstractmethod
    def resume(self, saved: DataState) -> list[str]:
        """Continue from a saved position; return notes for the user, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """

    @abstractmethod
    def close(self) -> None:
        """End the loader's workers; a later epoch starts new ones."""


class MapFeeder(Feeder):
    """Samples of a map-style dataset, in their global order.

    Args:
        dataset: Dataset with `__len__` and `__getitem__`.
        sampler: Sampler of this rank's share.
        collate: The Task's collate function.
        context: This rank's context.
        workers: As for `make_feeder`.
        prefetch: As for `make_feeder`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalOrderSampler,
        collate: Collate,
        context: Context,
        *,
        workers: int | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        self.sampler = sampler
        self.batch_size, self.accumulate = sampler.batch_size, sampler.accumulate
        self.data_rank, self.data_size = sampler.rank, sampler.world_size
        self._dataset, self._collate, self._context = dataset, collate, context
        self._workers = worker_count(context, workers)
        self._prefetch = prefetch
        self._loader: DataLoader[Any] | None = None

    @property
    def position(self) -> Position:
        """Steps, epochs and samples done, as counted by `advance`."""
        return self.sampler.position

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self.sampler.length

    @property
    def global_size(self) -> int:
        """Samples of a full optimizer step, of all ranks."""
        return self.sampler.global_size

    def epoch(self) -> Iterator[Step]:
        """Return the remaining steps of the current epoch."""
        by_loader = self._workers or (self._context.device.type != "cpu" and not self._is_shared)
        loaded = iter(self._get_loader()) if by_loader else self._load_here()
        if self._context.device.type == "cpu":
            batches = self._timed(loaded)
        else:
            # Without workers, loading draws from the random states of this process, so it must not run ahead.
            pull = self._timed(loaded).__next__
            batches = DevicePrefetcher(_or_none(pull), self._context.device, is_ahead=self._workers > 0)
        return (Step(plan, batches) for plan in self.sampler.schedule())

    def _get_loader(self) -> DataLoader[Any]:
        if self._loader is None:
            self._loader = make_loader(
                self._dataset,
                self.sampler,
                self._collate,
                self._context,
                workers=self._workers,
                prefetch=self._prefetch,
            )
        return self._loader

    @property
    def _is_shared(self) -> bool:
        return self.data_size < self._context.world_size

    def _load_here(self) -> Iterator[Any]:
        # Ranks that share their samples have different random states, but need the same augmentations.
        seed = self._context.seed if self._is_shared else None
        return load_in_process(self._dataset, self.sampler, self._collate, seed=seed)

    def _timed(self, loaded: Iterator[Any]) -> Iterator[Any]:
        clock = time.perf_counter
        began = clock()
        for batch in loaded:
            self.wait_seconds += clock() - began
            yield batch
            began = clock()

    def advance(self) -> None:
        """Count an optimizer step: move the position behind its samples, or to the start of the next epoch."""
        self.sampler.advance()

    def state(self) -> DataState:
        """Return the state for a checkpoint."""
        return self.sampler.state(self.sampler.position)

    def resume(self, saved: DataState) -> list[str]:
        """Continue from a saved position; return notes for the user, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        return self.sampler.resume(saved)

    def close(self) -> None:
        """End the loader's workers; a later epoch starts new ones."""
        self._loader = None


def _or_none(pull: Callable[[], Any]) -> Callable[[], Any]:
    def pulled() -> Any:
        try:
            return pull()
        except StopIteration:
            return NO_BATCH

    return pulled
