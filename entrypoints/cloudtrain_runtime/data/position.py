"""How far a run has come in its data, and how a step's samples are shared out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cloudtrain_runtime.data.global_order import ORDER_VERSION
from cloudtrain_runtime.errors import CheckpointError


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
        stream: Of a stream in the middle of an epoch: what else tells where it stands, JSON values.
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
    stream: Mapping[str, Any] | None = None

    @property
    def position(self) -> Position:
        """The part that training moves."""
        return Position(self.step, self.epoch, self.samples)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        content = asdict(self)
        if self.stream is None:
            del content["stream"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DataState:
        """Read what `to_json` has written.

        Raises:
            CheckpointError: a number is missing.
        """
        names = [field.name for field in fields(cls) if field.name != "stream"]
        try:
            return cls(**{name: int(content[name]) for name in names}, stream=content.get("stream"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not tell its position in the data: {error}") from None


def resolve_global_batch(
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
    micro_steps = ceil_div(ceil_div(kept, world_size), batch_size)
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


def plan_rank_batches(samples: int, rank: int, size: int, batch_size: int) -> GlobalBatch:
    """Return a rank's share of a step of so many samples: every rank has as many micro-batches, evenly filled."""
    own = len(range(rank, samples, size))
    micro_steps = micro_step_count(samples, size, batch_size)
    least, more = divmod(own, micro_steps)
    return GlobalBatch(samples, tuple(MicroBatch(least + (index < more)) for index in range(micro_steps)))


def micro_step_count(samples: int, size: int, batch_size: int) -> int:
    """Return the micro-steps that so many samples of all ranks take: equal on all of them, so that they line up."""
    return ceil_div(ceil_div(samples, size), batch_size)


def ceil_div(samples: int, parts: int) -> int:
    """Return the quotient, rounded up."""
    return -(-samples // parts)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
