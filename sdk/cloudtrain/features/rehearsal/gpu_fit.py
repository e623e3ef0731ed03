"""Changes of a job that make it fit a GPU, and what an out-of-memory error of PyTorch says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cloudtrain.features.rehearsal.rank_memory import RankMemory
from cloudtrain_runtime.contract import TrainConfig

MARGIN = 0.9
"""Share of the capacity that an estimate may use. Allocators leave gaps, and activations are an estimate."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = r"([\d.]+) ([KMGT]iB|bytes|B)"
_TRIED = re.compile(rf"(?:CUDA|HIP) out of memory\. Tried to allocate {_AMOUNT}")
_TOTAL = re.compile(rf"total capacity of {_AMOUNT}|{_AMOUNT} total capacity")
_FREE = re.compile(rf"of which {_AMOUNT} is free|{_AMOUNT} free")


@dataclass(frozen=True)
class OutOfMemory:
    """An out-of-memory error of PyTorch; figures in bytes, None where the message does not have them.

    Attributes:
        tried: The allocation that failed.
        capacity: Memory of the GPU.
        free: What was free.
    """

    tried: int
    capacity: int | None
    free: int | None


@dataclass(frozen=True)
class Variant:
    """A change of the job.

    Attributes:
        change: The change as options of `--set`, such as `train.precision=bf16`.
        train: The train section with it.
        effect: What else it changes, in a few words.
    """

    change: str
    train: TrainConfig
    effect: str


def parse_out_of_memory(text: str) -> OutOfMemory | None:
    """Return the first out-of-memory error of PyTorch in a log, or None. Forms: torch 1.x, 2.x and newer."""
    tried = _TRIED.search(text)
    if tried is None:
        return None
    line = text[tried.start() :].split("\n", maxsplit=1)[0]
    capacity = _TOTAL.search(line)
    free = _FREE.search(line)
    return OutOfMemory(
        _bytes(*tried.groups()),
        None if capacity is None else _bytes(*filter(None, capacity.groups())),
        None if free is None else _bytes(*filter(None, free.groups())),
    )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS.get(unit, 1))


def fits(memory: RankMemory, samples: int, capacity_bytes: float) -> bool:
    """Return whether the estimated peak of a micro-batch of so many samples is within the capacity, with a margin."""
    return memory.peak_bytes(samples) <= MARGIN * capacity_bytes


def smaller_batch(memory: RankMemory, train: TrainConfig, capacity_bytes: float) -> Variant | None:
    """Return the largest micro-batch that fits, with the accumulation that keeps the global batch; None if none does.

    Only divisors of the batch keep the samples of a step as they are.
    """
    size = train.batch_size
    divisors = (each for each in range(size // 2, 0, -1) if size % each == 0)
    found = next((each for each in divisors if fits(memory, each, capacity_bytes)), None)
    if found is None:
        return None
    accumulate = train.accumulate * size // found
    change = f"train.batch_size={found} and train.accumulate={accumulate}"
    return Variant(
        change,
        replace(train, batch_size=found, accumulate=accumulate),
        "the global batch stays the same",
    )


def variants(train: TrainConfig, data_ranks: int) -> Iterator[Variant]:
    """Yield changes that need less memory, those with the smallest effect on the training first."""
    if train.precision == "fp32":
        effect = "activations take about half, and numbers have 8 bits of precision"
        yield Variant("train.precision=bf16", replace(train, precision="bf16"), effect)
    if not train.activation_checkpointing:
        changed = replace(train, activation_checkpointing=True)
        yield Variant(
            "train.activation_checkpointing=true", changed, "a step takes about a third longer"
        )
    if train.parallel.data == "ddp" and data_ranks > 1:
        sharded = replace(train, parallel=replace(train.parallel, data="fsdp"))
        effect = f"each rank holds a part of the state: 1/{data_ranks}"
        yield Variant("train.parallel.data=fsdp", sharded, effect)
        both = replace(sharded, activation_checkpointing=True)
        if not train.activation_checkpointing:
            change = "train.parallel.data=fsdp and train.activation_checkpointing=true"
            yield Variant(change, both, f"{effect}, and a step takes about a third longer")


def needs_cpu(train: TrainConfig | None, ranks: int, gpus: int) -> bool:
    """Return whether ranks must leave the GPUs of this machine alone.

    Ranks that share a GPU use Gloo, which has the collectives of DDP for a GPU's tensors, and not those of sharded,
    tensor or pipeline parallel layouts.
    """
    return 0 < gpus < ranks and train is not None and not train.parallel.is_plain
