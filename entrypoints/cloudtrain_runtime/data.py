"""Which samples a rank sees, and when.

The global order of samples depends on seed and epoch only. Rank r of w takes every w-th sample of each global batch,
from the r-th on, so one process and many make the same steps from the same samples. How far a run has come is a handful
of numbers, however many samples and ranks there are.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from cloudtrain_runtime.context import Context, context
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.events import say
from cloudtrain_runtime.order import ORDER_VERSION, Order
from cloudtrain_runtime.seeds import random_number, seed_everything

_CHUNK = 16_384
"""Indices computed at once: few enough that torch does not share them out to threads, whose barriers cost more."""


@dataclass
class Position:
    """How far training has come. `samples` counts those of the present epoch's global order."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class DataState:
    """The position in the data as a checkpoint keeps it, and what it was counted in.

    Attributes:
        step: Optimizer steps done.
        epoch: Present epoch, from 0.
        samples: Samples of its global order that have been used.
        global_batch: Samples of an optimizer step.
        batch_size: Samples per rank and micro-step, as the job asked for.
        accumulate: Micro-steps per optimizer step, as the job asked for.
        world_size: Ranks.
        seed: Seed of the present epoch's order.
        length: Samples in the dataset.
        order: Version of the order.
    """

    step: int
    epoch: int
    samples: int
    global_batch: int
    batch_size: int
    accumulate: int
    world_size: int
    seed: int
    length: int
    order: int = ORDER_VERSION

    @property
    def position(self) -> Position:
        """The part that training moves."""
        return Position(self.step, self.epoch, self.samples)

    def to_json(self) -> dict[str, int]:
        """Return the state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DataState:
        """Read what `to_json` has written.

        Raises:
            CheckpointError: a number is missing.
        """
        try:
            return cls(**{field.name: int(content[field.name]) for field in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not tell its position in the data: {error}") from None


def agree_global_batch(
    saved: DataState | None, batch_size: int, accumulate: int, world_size: int
) -> tuple[int, str | None]:
    """Return the samples of an optimizer step, and a sentence about it where there is something to say.

    A run that is resumed with another number of ranks keeps its global batch, and so its steps; a job that asks for
    another batch_size or accumulate than before gets what it asks for.
    """
    asked = batch_size * accumulate * world_size
    if saved is None:
        return asked, None
    kept = saved.global_batch
    if (batch_size, accumulate) != (saved.batch_size, saved.accumulate):
        changed = f"the global batch was {kept} samples and is {asked} from step {saved.step} on"
        return asked, changed if asked != kept else None
    if world_size == saved.world_size:
        return kept, None
    sentence = f"the global batch stays at {kept} samples with {_ranks(world_size)} instead of {saved.world_size}"
    if kept % world_size:
        sentence += "; that does not divide, so ranks' shares differ by one sample"
    micro_steps = _ceil(_ceil(kept, world_size), batch_size)
    if micro_steps > accumulate:
        sentence += f"; a step takes {micro_steps} micro-steps, so that none exceeds {batch_size} samples"
    return kept, sentence


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass on this rank.

    Attributes:
        count: How many of them count; 0 when one sample only stands in so that every rank takes part.
    """

    count: int

    @property
    def samples(self) -> int:
        """How many the loader brings."""
        return max(self.count, 1)


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of one optimizer step.

    Attributes:
        samples: Samples of all ranks together.
        micro_batches: This rank's share: at least one, and as many as on every other rank.
    """

    samples: int
    micro_batches: tuple[MicroBatch, ...]


class GlobalOrderSampler(Sampler[list[int]]):
    """This rank's micro-batches of one epoch, as a batch sampler for a DataLoader.

    It replaces DistributedSampler: the same striding, but the last batch is neither padded with repeated samples nor
    dropped, and an epoch may start in its middle. In a script:

        sampler = GlobalOrderSampler(len(dataset), batch_size=32)
        # Without a generator of its own a loader draws from the global random state whenever it is started.
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

    The position is what `advance` has counted; what a loader has fetched ahead of it does not count.

    Args:
        length: Samples in the dataset.
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        seed: Seed of the order.
        rank: This process; by default `context()` knows.
        world_size: Number of processes; by default `context()` knows.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
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
        self.rank = context().rank if rank is None else rank
        self.world_size = context().world_size if world_size is None else world_size
        self.global_size, _ = agree_global_batch(None, batch_size, accumulate, self.world_size)
        self.position = Position()
        self._seeds: dict[int, int] = {}  # of the epoch that was begun with another seed

    def __len__(self) -> int:
        whole, rest = divmod(self.length - self.position.samples, self.global_size)
        return whole * self._micro_steps(self.global_size) + (self._micro_steps(rest) if rest else 0)

    def __iter__(self) -> Iterator[list[int]]:
        # Where it starts is fixed now, not when a loader asks for the first batch.
        return self._batches(self.position.epoch, self.position.samples)

    def schedule(self) -> Iterator[GlobalBatch]:
        """Return the steps of the rest of the epoch; the loader brings their micro-batches one after the other."""
        whole, rest = divmod(self.length - self.position.samples, self.global_size)
        return self._steps(whole, rest)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return _ceil(self.length, self.global_size)

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.position.step

    # ------------------------------------------------------------ the position

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Choose the epoch, and the sample of its order to start from: by default where it stands, or 0 for another."""
        if start is None:
            start = self.position.samples if epoch == self.position.epoch else 0
        self.position = Position(self.position.step, epoch, start)

    def advance(self) -> None:
        """Count an optimizer step."""
        at = self.position
        used = min(at.samples + self.global_size, self.length)
        if used == self.length:
            self.position = Position(at.step + 1, at.epoch + 1, 0)
        else:
            self.position = Position(at.step + 1, at.epoch, used)

    def state(self, position: Position) -> DataState:
        """Return what a checkpoint must keep at a position."""
        return DataState(
            **asdict(position),
            global_batch=self.global_size,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            world_size=self.world_size,
            seed=self._seed_of(position.epoch),
            length=self.length,
        )

    def resume(self, saved: DataState) -> list[str]:
        """Go on from a saved position; return what is to be said about it, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        notes = [*self._differences(saved)]
        self.global_size, note = agree_global_batch(saved, self.batch_size, self.accumulate, self.world_size)
        self.position = saved.position
        # The epoch that was begun ends in its own order, or samples would be lost and repeated.
        self._seeds = {saved.epoch: saved.seed} if saved.samples else {}
        return [*notes, note] if note else notes

    def state_dict(self) -> dict[str, int]:
        """Return the state to save, after the steps that `advance` has counted."""
        return self.state(self.position).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, and say what has changed since.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        for note in self.resume(DataState.from_json(state)):
            if self.rank == 0:
                say(note)

    def _differences(self, saved: DataState) -> Iterator[str]:
        where = f"{saved.samples:,} samples into epoch {saved.epoch}"
        if saved.length != self.length:
            sizes = (
                f"the training data has {self.length:,} samples and had {saved.length:,} when the checkpoint was saved"
            )
            if saved.samples:
                raise CheckpointError(
                    f"{sizes}, {where}: which of them are left can't be told. Resume with the data of then, from a "
                    "checkpoint at the end of an epoch, or start anew with checkpoint.resume: never"
                )
            yield f"warning: {sizes}; epoch {saved.epoch} begins with those of today"
        if saved.order != ORDER_VERSION:
            if saved.samples:
                raise CheckpointError(
                    f"the checkpoint was saved {where} by a cloudtrain that shuffles in another way (version "
                    f"{saved.order}, here {ORDER_VERSION}): resume it with that cloudtrain, from a checkpoint at the "
                    "end of an epoch, or start anew with checkpoint.resume: never"
                )
            yield f"warning: from epoch {saved.epoch} on samples are shuffled in another way, by another cloudtrain"
        if saved.seed != self.seed:
            first = saved.epoch + 1 if saved.samples else saved.epoch
            yield f"warning: the seed was {saved.seed} and is {self.seed}: it orders the samples from epoch {first} on"

    def _seed_of(self, epoch: int) -> int:
        return self._seeds.get(epoch, self.seed)

    # ------------------------------------------------------------ the batches

    def _micro_steps(self, samples: int) -> int:
        """Return the micro-steps that so many samples of all ranks take: equal on all of them, so that they line up."""
        return _ceil(_ceil(samples, self.world_size), self.batch_size)

    def _plan(self, samples: int) -> GlobalBatch:
        own = len(range(self.rank, samples, self.world_size))
        least, more = divmod(own, self._micro_steps(samples))
        counts = [least + (index < more) for index in range(self._micro_steps(samples))]
        return GlobalBatch(samples, tuple(map(MicroBatch, counts)))

    def _steps(self, whole: int, rest: int) -> Iterator[GlobalBatch]:
        plan = self._plan(self.global_size)
        for _ in range(whole):
            yield plan
        if rest:
            yield self._plan(rest)

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        order = Order(self.length, self._seed_of(epoch), epoch)
        plan = self._plan(self.global_size)
        whole, rest = divmod(self.length - start, self.global_size)
        end = start + whole * self.global_size
        stride = self.global_size * max(1, _CHUNK // sum(micro.samples for micro in plan.micro_batches))
        for first in range(start, end, stride):
            yield from self._cut(order, torch.arange(first, min(first + stride, end), self.global_size), plan)
        if rest:
            yield from self._cut(order, torch.tensor([end]), self._plan(rest))

    def _cut(self, order: Order, firsts: torch.Tensor, plan: GlobalBatch) -> Iterator[list[int]]:
        """Yield the micro-batches of some global batches, told by the position of their first sample."""
        # Where a rank has fewer samples than micro-steps, the first of the batch stands in.
        stand_ins = [0] * sum(micro.count == 0 for micro in plan.micro_batches)
        own = torch.tensor([*range(self.rank, plan.samples, self.world_size), *stand_ins])
        rows: list[list[int]] = order.at(firsts[:, None] + own).tolist()
        if len(plan.micro_batches) == 1:
            yield from rows
            return
        for row in rows:
            at = 0
            for micro in plan.micro_batches:
                yield row[at : at + micro.samples]
                at += micro.samples


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
    dataset: Dataset[Any],
    sampler: Sampler[list[int]],
    collate: Callable[[Sequence[Any]], Any],
    place: Context,
    *,
    workers: int | None = None,
) -> DataLoader[Any]:
    """Return a loader of this rank's batches.

    Args:
        dataset: A split.
        sampler: What this rank sees of it.
        collate: The Task's.
        place: This rank's place.
        workers: Processes that load; None means up to 8 per rank beside a GPU, and none otherwise.
    """
    on_gpu = place.device.type == "cuda"
    if workers is None:
        workers = min(8, (os.cpu_count() or 1) // place.local_world_size) if on_gpu else 0
    epoch = sampler.epoch if isinstance(sampler, GlobalOrderSampler) else 0
    return DataLoader(
        _Seeded(dataset, place.seed, epoch) if workers else dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=on_gpu,
        worker_init_fn=ignore_stop_signals if workers else None,
        # The order of samples is drawn by the sampler; the loader must not touch the global random state.
        generator=torch.Generator().manual_seed(place.seed),
    )


class _Seeded(Dataset[list[Any]]):
    """A dataset in a loader's worker, whose random augmentations depend on the batch and not on what came before it.

    A worker starts anew with the run, in the middle of an epoch, too; and each batch may fall to another worker then.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch

    def __getitems__(self, indices: list[int]) -> Any:
        seed_everything(random_number(self.seed, self.epoch, indices[0]) >> 1)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def ignore_stop_signals(worker: int) -> None:  # noqa: ARG001 (the loader's signature)
    """Let a data-loader worker outlive the notice to stop: its rank still needs it to reach the step boundary."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor moved to a device."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def _ceil(samples: int, parts: int) -> int:
    return -(-samples // parts)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
