"""What the loop takes its micro-batches from: a step's samples on the device, and how far the run has come."""

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
        plan: How many there are, of all ranks and in each of this rank's micro-batches.
        batches: Brings them, each once.
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
        wait_seconds: Time spent in waiting for batches so far (loading itself, where there are no workers).
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        data_rank: Which of the shares of the data this rank reads.
        data_size: How many shares there are.
    """

    wait_seconds: float = 0.0
    batch_size: int
    accumulate: int
    data_rank: int
    data_size: int

    @property
    @abstractmethod
    def position(self) -> Position:
        """How far training has come; `advance` moves it."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Samples of an epoch, or None when nobody can know before its end."""

    @property
    @abstractmethod
    def global_size(self) -> int:
        """Samples of a whole optimizer step, of all ranks together."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of a whole epoch, or None when nobody can know before its end."""
        return None if self.length is None else -(-self.length // self.global_size)

    @abstractmethod
    def epoch(self) -> Iterator[Step]:
        """Return the steps of the rest of the present epoch."""

    @abstractmethod
    def advance(self) -> None:
        """Count an optimizer step: move the position behind its samples, or to the start of the next epoch."""

    @abstractmethod
    def state(self) -> DataState:
        """Return what a checkpoint must keep. All ranks call it together."""

    @abstractmethod
    def resume(self, saved: DataState) -> list[str]:
        """Go on from a saved position; return what is to be said about it, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """

    @abstractmethod
    def close(self) -> None:
        """End the loader's workers; a later epoch starts others."""


class MapFeeder(Feeder):
    """Samples of a map-style dataset, in their global order.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        sampler: What this rank sees of it.
        collate: The Task's.
        place: This rank's place.
        workers: As for `make_feeder`.
        prefetch: As for `make_feeder`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalOrderSampler,
        collate: Collate,
        place: Context,
        *,
        workers: int | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        self.sampler = sampler
        self.batch_size, self.accumulate = sampler.batch_size, sampler.accumulate
        self.data_rank, self.data_size = sampler.rank, sampler.world_size
        self._dataset, self._collate, self._place = dataset, collate, place
        self._workers = worker_count(place, workers)
        self._prefetch = prefetch
        self._loader: DataLoader[Any] | None = None

    @property
    def position(self) -> Position:
        """How far training has come; `advance` moves it."""
        return self.sampler.position

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self.sampler.length

    @property
    def global_size(self) -> int:
        """Samples of a whole optimizer step, of all ranks together."""
        return self.sampler.global_size

    def epoch(self) -> Iterator[Step]:
        """Return the steps of the rest of the present epoch."""
        by_loader = self._workers or (self._place.device.type != "cpu" and not self._is_shared)
        loaded = iter(self._its_loader()) if by_loader else self._here()
        if self._place.device.type == "cpu":
            batches = self._timed(loaded)
        else:
            # A batch that is loaded in this process draws from its random states: never before its turn.
            pull = self._timed(loaded).__next__
            batches = DevicePrefetcher(_or_none(pull), self._place.device, is_ahead=self._workers > 0)
        return (Step(plan, batches) for plan in self.sampler.schedule())

    def _its_loader(self) -> DataLoader[Any]:
        if self._loader is None:
            self._loader = make_loader(
                self._dataset,
                self.sampler,
                self._collate,
                self._place,
                workers=self._workers,
                prefetch=self._prefetch,
            )
        return self._loader

    @property
    def _is_shared(self) -> bool:
        return self.data_size < self._place.world_size

    def _here(self) -> Iterator[Any]:
        # Ranks that share their samples have random states of their own, and must see the same augmentations.
        seed = self._place.seed if self._is_shared else None
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
        """Return what a checkpoint must keep."""
        return self.sampler.state(self.sampler.position)

    def resume(self, saved: DataState) -> list[str]:
        """Go on from a saved position; return what is to be said about it, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        return self.sampler.resume(saved)

    def close(self) -> None:
        """End the loader's workers; a later epoch starts others."""
        self._loader = None


def _or_none(pull: Callable[[], Any]) -> Callable[[], Any]:
    def pulled() -> Any:
        try:
            return pull()
        except StopIteration:
            return NO_BATCH

    return pulled
