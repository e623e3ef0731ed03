"""Samplers of map-style datasets.

The global order of samples depends on seed and epoch only. Rank r of w takes every w-th sample of each global batch,
starting with the r-th, so any number of ranks takes the same steps with the same samples. The position is a few
numbers, for any number of samples and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import Sampler

from cloudtrain_runtime.data.global_order import ORDER_VERSION, GlobalOrder, Order
from cloudtrain_runtime.data.position import (
    DataState,
    GlobalBatch,
    MicroBatch,
    Position,
    ceil_div,
    check_full_steps,
    micro_step_count,
    plan_rank_batches,
    resolve_global_batch,
    seed_difference,
)
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.run_context import context

_CHUNK = 16_384
"""Indices computed at once: so few that torch uses one thread, because synchronising threads costs more."""


class GlobalOrderSampler(Sampler[list[int]]):
    """This rank's micro-batches of one epoch, as a batch sampler for a DataLoader.

    It replaces DistributedSampler: the same striding, but the last batch is neither padded with repeated samples nor
    dropped, and an epoch may start in the middle. In a script:

        sampler = GlobalOrderSampler(len(dataset), batch_size=32)
        # Without its own generator, a loader draws from the global random state whenever it starts.
        own = torch.Generator()
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4, persistent_workers=True, generator=own)
        checkpoint.load(model=model, optimizer=optimizer, sampler=sampler)
        while sampler.epoch < 3:
            batches = iter(loader)
            for step in sampler.schedule():
                for micro in step.micro_batches:
                    weight = micro.count * sampler.world_size / step.samples
                    (loss_of(next(batches)) * weight).backward()
                optimizer.step()
                sampler.advance()

    The position counts the steps of `advance`, not the batches that a loader has prefetched.

    Args:
        length: Samples in the dataset.
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        seed: Seed of the order.
        drop_last: Whether an epoch leaves out its last samples where they do not fill a step, so that every rank has
            equally many samples in each step.
        rank: Rank of this process; by default that of `context()`.
        world_size: Number of processes; by default that of `context()`.
        order: Returns the order of an epoch from length, seed and epoch.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        order: Callable[[int, int, int], Order] = GlobalOrder,
    ) -> None:
        if min(length, batch_size, accumulate) < 1:
            raise ValueError(
                "length, batch_size and accumulate must be at least 1; "
                f"they are {length}, {batch_size} and {accumulate}"
            )
        self.length = length
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        self.drop_last = drop_last
        self.rank = context().rank if rank is None else rank
        self.world_size = context().world_size if world_size is None else world_size
        self.global_size, _ = resolve_global_batch(None, batch_size, accumulate, self.world_size)
        self.position = Position()
        self._order = order
        # Seeds of the epochs that began with another seed.
        self._seeds: dict[int, int] = {}

    @property
    def smallest_batch(self) -> int:
        """Samples in the smallest forward pass of an epoch, on any rank."""
        rest = self.length % self.global_size
        steps = []
        if self.length >= self.global_size:
            steps.append(self.global_size)
        if rest and not self.drop_last:
            steps.append(rest)
        # The last rank has the fewest samples, and the fewest of them in its last micro-batch.
        last = self.world_size - 1
        plans = [plan_rank_batches(each, last, self.world_size, self.batch_size) for each in steps]
        return min((plan.micro_batches[-1].samples for plan in plans), default=0)

    def __len__(self) -> int:
        full, rest = divmod(self.length - self.position.samples, self.global_size)
        of_full = full * micro_step_count(self.global_size, self.world_size, self.batch_size)
        of_rest = micro_step_count(rest, self.world_size, self.batch_size)
        return of_full if self.drop_last else of_full + of_rest

    def __iter__(self) -> Iterator[list[int]]:
        # The start is fixed now, not when a loader requests the first batch.
        return self._batches(self.position.epoch, self.position.samples, torch.Tensor.tolist)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the batches as int64 tensors, for gathering samples from tensors."""
        return self._batches(self.position.epoch, self.position.samples, torch.Tensor.unbind)

    def schedule(self) -> Iterator[GlobalBatch]:
        """Return the remaining steps of the epoch; the loader returns their micro-batches in this order.

        Raises:
            TaskError: with `drop_last`, no step has equally many samples on every rank.
        """
        if self.drop_last:
            check_full_steps(self.global_size, self.world_size, self.length)
        full, rest = divmod(self.length - self.position.samples, self.global_size)
        last = [self._plan(rest)] if rest and not self.drop_last else []
        return chain(repeat(self._plan(self.global_size), full), last)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a full epoch."""
        if self.drop_last:
            return self.length // self.global_size
        return ceil_div(self.length, self.global_size)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.position.step

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Set the epoch and the sample to start from: by default the position, or 0 for another epoch."""
        if start is None:
            start = self.position.samples if epoch == self.position.epoch else 0
        self.position = Position(self.position.step, epoch, start)

    def advance(self) -> None:
        """Count an optimizer step."""
        at = self.position
        used = at.samples + self.global_size
        is_end = not self._has_step_after(used)
        self.position = Position(at.step + 1, at.epoch + is_end, 0 if is_end else used)

    def state(self) -> DataState:
        """Return the state for a checkpoint, after the steps that `advance` has counted."""
        return DataState(
            **asdict(self.position),
            global_batch=self.global_size,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            world_size=self.world_size,
            seed=self.seed_of(self.position.epoch),
            length=self.length,
        )

    def resume(self, saved: DataState) -> list[str]:
        """Continue from a saved position; return notes for the user, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        notes = [*self._differences(saved)]
        self.global_size, note = resolve_global_batch(
            saved, self.batch_size, self.accumulate, self.world_size
        )
        self.position = saved.position
        if saved.samples and not self._has_step_after(saved.samples):
            self.position = Position(saved.step, saved.epoch + 1, 0)
        # The current epoch keeps its order; with another order, samples would be lost or repeated.
        self._seeds = {saved.epoch: saved.seed} if saved.samples else {}
        return [*notes, note] if note else notes

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, after the steps that `advance` has counted."""
        return self.state().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, and log what has changed since.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        for note in self.resume(DataState.from_json(state)):
            if self.rank == 0:
                log_line(note)

    def _differences(self, saved: DataState) -> Iterator[str]:
        where = f"{saved.samples:,} samples into epoch {saved.epoch}"
        if saved.length != self.length:
            sizes = f"the training data has {self.length:,} samples and had {saved.length:,} when the checkpoint was saved"
            if saved.samples:
                raise CheckpointError(
                    f"{sizes}, {where}: the remaining ones are unknown. Resume with the same data, from a "
                    "checkpoint at the end of an epoch, or start a new run with checkpoint.resume: never"
                )
            yield f"warning: {sizes}; epoch {saved.epoch} begins with the present ones"
        if saved.order != ORDER_VERSION:
            if saved.samples:
                raise CheckpointError(
                    f"the checkpoint was saved {where} by a cloudtrain with another order of samples (version "
                    f"{saved.order}, here {ORDER_VERSION}): resume it with that cloudtrain, from a checkpoint at the "
                    "end of an epoch, or start a new run with checkpoint.resume: never"
                )
            yield f"warning: from epoch {saved.epoch} on samples have another order, because cloudtrain has changed"
        yield from seed_difference(saved, self.seed)

    def _has_step_after(self, samples: int) -> bool:
        """Return whether the samples of an epoch are enough for another step after some of them."""
        least = self.global_size if self.drop_last else 1
        return samples + least <= self.length

    def seed_of(self, epoch: int) -> int:
        """Return the seed of an epoch's order."""
        return self._seeds.get(epoch, self.seed)

    def _plan(self, samples: int) -> GlobalBatch:
        return plan_rank_batches(samples, self.rank, self.world_size, self.batch_size)

    def _batches(
        self, epoch: int, start: int, rows_of: Callable[[torch.Tensor], Sequence[Any]]
    ) -> Iterator[Any]:
        """Yield batches, computed for many rows of samples at once and converted by `rows_of`."""
        order = self._order(self.length, self.seed_of(epoch), epoch)
        plan = self._plan(self.global_size)
        full, rest = divmod(self.length - start, self.global_size)
        end = start + full * self.global_size
        own_samples = sum(micro.samples for micro in plan.micro_batches)
        stride = self.global_size * max(1, _CHUNK // own_samples)
        for first in range(start, end, stride):
            firsts = torch.arange(first, min(first + stride, end), self.global_size)
            yield from _cut(rows_of(self._samples(order, firsts, plan)), plan)
        if rest and not self.drop_last:
            plan = self._plan(rest)
            yield from _cut(rows_of(self._samples(order, torch.tensor([end]), plan)), plan)

    def _samples(self, order: Order, firsts: torch.Tensor, plan: GlobalBatch) -> torch.Tensor:
        """Return this rank's samples [global batch, sample] of the global batches that start at `firsts`."""
        # If a rank has fewer samples than micro-steps, the first sample of the batch is the
        # placeholder.
        placeholders = [0] * sum(micro.count == 0 for micro in plan.micro_batches)
        own = torch.tensor([*range(self.rank, plan.samples, self.world_size), *placeholders])
        return order.at(firsts[:, None] + own)


def _cut(rows: Sequence[Any], plan: GlobalBatch) -> Iterator[Any]:
    """Yield the micro-batches of rows, one row per global batch."""
    if len(plan.micro_batches) == 1:
        yield from rows
        return
    for row in rows:
        at = 0
        for micro in plan.micro_batches:
            yield row[at : at + micro.samples]
            at += micro.samples


class EvaluationShards(Sampler[list[int]]):
    """Batches of this rank's share of an evaluation split, with `even` the same number on every rank.

    The forward pass of a sharded model communicates, so all ranks must run it equally often. A rank without samples
    uses the first sample as a placeholder, which does not count.

    Args:
        length: Samples in the split.
        batch_size: Samples per rank.
        data_rank: Index of this rank's share of the data.
        data_size: Number of shares of the data.
        even: Whether every rank has the same number of batches.
    """

    def __init__(
        self, length: int, *, batch_size: int, data_rank: int, data_size: int, even: bool = True
    ) -> None:
        self.indices = range(data_rank, length, data_size)
        self.batch_size = batch_size
        longest = ceil_div(length, data_size) if even else len(self.indices)
        self._batches = ceil_div(longest, batch_size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(self._batches):
            yield list(self._slice(at)) or [0]

    @property
    def micro_batches(self) -> Iterator[MicroBatch]:
        """The number of samples that count in each batch."""
        return (MicroBatch(len(self._slice(at))) for at in range(self._batches))

    def _slice(self, batch: int) -> range:
        return self.indices[batch * self.batch_size : (batch + 1) * self.batch_size]
