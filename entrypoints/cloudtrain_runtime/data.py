"""Which samples a rank sees, and when.

The global order of samples depends on seed and epoch only. Rank r of w takes every w-th sample of each global batch,
from the r-th on, so one process and many make the same steps from the same samples.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from cloudtrain_runtime.context import Context


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass on this rank.

    Attributes:
        indices: Indices into the dataset.
        count: How many of them count; 0 when one sample only stands in so that every rank takes part.
    """

    indices: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of one optimizer step.

    Attributes:
        samples: Samples of all ranks together.
        micro_batches: This rank's share, at least one.
    """

    samples: int
    micro_batches: tuple[MicroBatch, ...]


class GlobalOrderSampler(Sampler[list[int]]):
    """This rank's micro-batches of one epoch, as a batch sampler for a DataLoader.

    It replaces DistributedSampler: the same striding, but the last batch is neither padded with repeated samples nor
    dropped, and an epoch may start in its middle.

    Args:
        length: Samples in the dataset.
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        rank: This process.
        world_size: Number of processes.
        seed: Seed of the order.
    """

    def __init__(self, length: int, *, batch_size: int, accumulate: int, rank: int, world_size: int, seed: int) -> None:
        self.length = length
        self.batch_size = batch_size
        self.global_size = batch_size * accumulate * world_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and the sample of its order to start from."""
        self.epoch = epoch
        self.start = start

    def __len__(self) -> int:
        return sum(len(batch.micro_batches) for batch in self.schedule())

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.schedule():
            for micro in batch.micro_batches:
                yield list(micro.indices)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return math.ceil(self.length / self.global_size)

    def schedule(self) -> Iterator[GlobalBatch]:
        """Yield the rest of the epoch, one global batch per optimizer step."""
        order = self._order()
        for first in range(self.start, self.length, self.global_size):
            chosen = order[first : first + self.global_size]
            own: list[int] = chosen[self.rank :: self.world_size].tolist()
            micro = tuple(
                MicroBatch(tuple(own[at : at + self.batch_size]), len(own[at : at + self.batch_size]))
                for at in range(0, len(own), self.batch_size)
            )
            # Fewer samples than ranks are left: every rank must still take part in the gradient's all-reduce.
            stand_in = (MicroBatch((int(chosen[0]),), 0),)
            yield GlobalBatch(len(chosen), micro or stand_in)

    def _order(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.length, generator=generator)


class ShardSampler(Sampler[list[int]]):
    """Batches of this rank's share of an evaluation split: every sample exactly once over all ranks."""

    def __init__(self, length: int, *, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, length, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(0, len(self.indices), self.batch_size):
            yield list(self.indices[at : at + self.batch_size])


def make_loader(
    dataset: Dataset[Any], sampler: Sampler[list[int]], collate: Callable[[Sequence[Any]], Any], place: Context
) -> DataLoader[Any]:
    """Return a loader of this rank's batches."""
    on_gpu = place.device.type == "cuda"
    workers = min(8, (os.cpu_count() or 1) // place.local_world_size) if on_gpu else 0
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=on_gpu,
        worker_init_fn=ignore_stop_signals if workers else None,
        # The order of samples is drawn by the sampler; the loader must not touch the global random state.
        generator=torch.Generator().manual_seed(place.seed),
    )


def ignore_stop_signals(worker: int) -> None:  # noqa: ARG001 (the loader's signature)
    """Let a data-loader worker outlive the notice to stop: its rank still needs it to reach the step boundary."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor moved to a device."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
