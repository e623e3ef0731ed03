"""Position of a run in its data, and the division of a step's samples among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cloudtrain_runtime.data.global_order import ORDER_VERSION
from cloudtrain_runtime.errors import CheckpointError, TaskError


@dataclass
class Position:
    """Steps and epochs done, and the samples done of the current epoch."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class ReaderShare:
    """Index of a rank among the ranks that read the same data."""

    rank: int
    size: int


@dataclass(frozen=True)
class DataState:
    """The position in the data as stored in a checkpoint, with the settings that it depends on."""

    # optimizer steps done
    step: int
    # current epoch, from 0
    epoch: int
    # samples of the epoch's global order that have been used
    samples: int
    # samples of an optimizer step
    global_batch: int
    # samples per rank and micro-step, as set in the job
    batch_size: int
    # micro-steps per optimizer step, as set in the job
    accumulate: int
    # ranks
    world_size: int
    # seed of the current epoch's order
    seed: int
    # samples in the dataset
    length: int
    # version of the order
    order: int = ORDER_VERSION
    # further state of a stream in the middle of an epoch, as JSON values
    stream: Mapping[str, Any] | None = None

    @property
    def position(self) -> Position:
        """Steps, epochs and samples done."""
        return Position(self.step, self.epoch, self.samples)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        content = asdict(self)
        if self.stream is None:
            del content["stream"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DataState:
        """Return the state from the JSON object of `to_json`; raise a CheckpointError if a number is missing."""
        names = [field.name for field in fields(cls) if field.name != "stream"]
        try:
            return cls(**{name: int(content[name]) for name in names}, stream=content.get("stream"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint has no valid position in the data: {error}"
            ) from None


def resolve_global_batch(
    saved: DataState | None, batch_size: int, accumulate: int, world_size: int
) -> tuple[int, str | None]:
    """Return the samples of an optimizer step, and a note for the user or None.

    A run that resumes with another number of ranks keeps its global batch, and so its steps. A new batch_size or
    accumulate in the job changes the global batch.
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
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    sentence = (
        f"the global batch stays at {kept} samples with {ranks} instead of {saved.world_size}"
    )
    if kept % world_size:
        sentence += "; it is not divisible, so ranks' shares differ by one sample"
    micro_steps = micro_step_count(kept, world_size, batch_size)
    if micro_steps > accumulate:
        sentence += (
            f"; a step takes {micro_steps} micro-steps, so that none exceeds {batch_size} samples"
        )
    return kept, sentence


def seed_difference(saved: DataState, seed: int) -> Iterator[str]:
    """Yield a warning for the user if a resumed run has another seed."""
    if saved.seed != seed:
        first = saved.epoch + 1 if saved.samples else saved.epoch
        yield f"warning: the seed was {saved.seed} and is {seed}: it orders the samples from epoch {first} on"


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass on this rank."""

    # samples that count; 0 for one placeholder sample, with which the rank takes part in
    # collectives
    count: int

    @property
    def samples(self) -> int:
        """Number of samples that the loader returns."""
        return max(self.count, 1)


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of one optimizer step."""

    # samples of all ranks
    samples: int
    # this rank's micro-batches: at least one, and the same number on every rank
    micro_batches: tuple[MicroBatch, ...]


def plan_rank_batches(samples: int, rank: int, size: int, batch_size: int) -> GlobalBatch:
    """Return a rank's share of a step: the same number of evenly filled micro-batches on every rank."""
    own = len(range(rank, samples, size))
    micro_steps = micro_step_count(samples, size, batch_size)
    least, more = divmod(own, micro_steps)
    # The first micro-batches take the samples that remain.
    counts = [least + (index < more) for index in range(micro_steps)]
    return GlobalBatch(samples, tuple(map(MicroBatch, counts)))


def micro_step_count(samples: int, size: int, batch_size: int) -> int:
    """Return the number of micro-steps for a number of samples of all ranks; it is the same on all ranks."""
    return ceil_div(ceil_div(samples, size), batch_size)


def check_full_steps(global_size: int, ranks: int, length: int | None = None) -> None:
    """Raise a TaskError if `train.drop_last` leaves no step, or ranks have different numbers of samples in a step."""
    if length is not None and length < global_size:
        raise TaskError(
            f"train.drop_last: the training data has {length:,} samples, fewer than the {global_size:,} of a step: "
            "lower train.batch_size or train.accumulate, or set train.drop_last: false"
        )
    if global_size % ranks:
        raise TaskError(
            f"train.drop_last: the global batch of {global_size:,} samples cannot be shared equally by {ranks} ranks: "
            "resume with a number of ranks that divides it, or change train.batch_size"
        )


def ceil_div(samples: int, parts: int) -> int:
    """Return the quotient, rounded up."""
    return -(-samples // parts)
