"""Feeder of map-style datasets: the micro-batches of each step on the device, and the position in the data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from cloudtrain_runtime.data.global_order import GlobalOrder, Order, TaskOrder
from cloudtrain_runtime.data.loader import (
    NO_BATCH,
    DevicePrefetcher,
    Loader,
    Loading,
    load_in_process,
    make_loader,
    worker_count,
)
from cloudtrain_runtime.data.position import GlobalBatch, MicroBatch, Position, ReaderShare
from cloudtrain_runtime.data.samplers import GlobalOrderSampler
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context


@dataclass(frozen=True, slots=True)
class Step:
    """The samples of one optimizer step: `for micro, batch in step`, each batch on this rank's device."""

    # number of samples of all ranks, and in each of this rank's micro-batches
    plan: GlobalBatch
    # iterator over this rank's micro-batches
    batches: Iterator[Any]

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        return zip(self.plan.micro_batches, self.batches, strict=False)


class MapFeeder:
    """Samples of a map-style dataset, which has `__len__` and `__getitem__`, in their global order.

    It has the methods of a StreamFeeder.

    Attributes:
        length: Samples of an epoch.
    """

    def __init__(
        self, dataset: Dataset[Any], context: Context, share: ReaderShare, loading: Loading
    ) -> None:
        own: Any = loading.sampler
        self._has_own_order = own is not None
        self._task_order = functools.lru_cache(maxsize=1)(partial(TaskOrder, own, len(dataset)))  # type: ignore[arg-type]

        def order_of_task(_: int, seed: int, epoch: int) -> Order:
            return self._task_order(seed, epoch)

        self._sampler = GlobalOrderSampler(
            len(dataset if own is None else own),  # type: ignore[arg-type]
            order=GlobalOrder if own is None else order_of_task,
            batch_size=loading.batch_size,
            accumulate=loading.accumulate,
            seed=loading.seed,
            drop_last=loading.drop_last,
            rank=share.rank,
            world_size=share.size,
        )
        self.length = self._sampler.length
        self.advance = self._sampler.advance
        self.state = self._sampler.state
        self.resume = self._sampler.resume
        self._dataset = dataset
        self._collate = loading.collate
        self._context = context
        self._workers = worker_count(context, loading.workers)
        self._is_shared = share.size < context.world_size
        self._loader: Loader | None = None

    @property
    def position(self) -> Position:
        return self._sampler.position

    @property
    def smallest_batch(self) -> int | None:
        return self._sampler.smallest_batch

    @property
    def global_size(self) -> int:
        return self._sampler.global_size

    def epoch(self) -> Iterator[Step]:
        dataset = self._dataset
        sampler = self._sampler
        collate = self._collate
        context = self._context
        if self._has_own_order:
            order = self._task_order(sampler.seed_of(sampler.epoch), sampler.epoch)
            if len(set(gather(order.checksum, context))) > 1:
                raise TaskError(
                    "sampler() must yield the same indices on every rank; these depend on rank or process"
                )
        is_on_cpu = context.device.type == "cpu"
        if self._workers or not (is_on_cpu or self._is_shared):
            if self._loader is None:
                self._loader = make_loader(
                    dataset, sampler, collate, context, workers=self._workers
                )
            batches: Iterator[Any] = iter(self._loader)
        else:
            # Ranks that share their samples have different random states, but need the same
            # augmentations.
            seed = context.seed if self._is_shared else None
            batches = load_in_process(dataset, sampler, collate, seed=seed)
        if not is_on_cpu:
            # Without workers, loading draws from the random states of this process, so it must not
            # run ahead.
            pull = partial(next, batches, NO_BATCH)
            batches = DevicePrefetcher(pull, self._context.device, is_ahead=self._workers > 0)
        return (Step(plan, batches) for plan in self._sampler.schedule())

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None
