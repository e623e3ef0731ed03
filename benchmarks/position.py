"""Measure how fast a rank computes its samples, saves its position and resumes, and the cost of the sampler per step.

    .venv/bin/python benchmarks/position.py [--samples 1000000000] [--ranks 1024] [--turns 5] [--write FILE]

The first part measures one rank of many in the middle of an epoch. The second part reads an epoch of a small dataset
with cloudtrain's sampler and with torch's DistributedSampler in a BatchSampler, alternately. It reads lists of indices,
and no data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, replace_marked
from torch.utils.data import BatchSampler, DistributedSampler

from cloudtrain_runtime.data import DataState, GlobalOrderSampler, Position

_BATCH_SIZE = 32
_MOST_MILLISECONDS = 50
_MOST_BYTES = 10_000
_SMALL = ((60_000, 1), (60_000, 2), (60_000, 4), (1_000_000, 1), (1_000_000, 8))
"""Samples and ranks of the small datasets."""


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", type=Path, help="file whose marked part the figures replace")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # as in a rank under torchrun
    text = "\n".join(
        [
            *_position(chosen.samples, chosen.ranks, chosen.turns),
            "",
            *_steps(chosen.turns),
            "",
            f"Medians of {chosen.turns} turns on {describe_machine()}, torch {torch.__version__}, one thread.",
        ]
    )
    print(text)
    if chosen.write:
        replace_marked(chosen.write, text)


def _position(samples: int, ranks: int, turns: int) -> list[str]:
    """Return a table about one rank of many; exit if a goal is missed."""
    middle = Position(step=samples // (2 * ranks * _BATCH_SIZE), epoch=1, samples=samples // 2)

    def first() -> Any:
        return next(iter(_rank(samples, ranks)))

    def save() -> str:
        return json.dumps(_rank(samples, ranks).state(middle).to_json())

    saved = save()

    def restore() -> Any:
        sampler = _rank(samples, ranks)
        sampler.resume(DataState.from_json(json.loads(saved)))
        return next(iter(sampler))

    rows = {"first step of an epoch": first, "save": save, "restore, and the next step": restore}
    milliseconds = {what: [_seconds(action) * 1e3 for _ in range(turns + 1)][1:] for what, action in rows.items()}
    slowest, size = max(map(max, milliseconds.values())), len(saved.encode())
    if slowest > _MOST_MILLISECONDS or size > _MOST_BYTES:
        sys.exit(f"the goal is missed: {slowest:.1f} ms, {size} bytes")
    return [
        f"| position of {ranks:,} ranks in {samples:,} samples | median ms | min to max | goal |",
        "|---|---|---|---|",
        *(
            f"| {what} | {statistics.median(own):.2f} | {min(own):.2f} to {max(own):.2f} | {_MOST_MILLISECONDS} ms |"
            for what, own in milliseconds.items()
        ),
        f"| size of what is saved | {size} bytes | | {_MOST_BYTES:,} bytes |",
    ]


def _rank(samples: int, ranks: int) -> GlobalOrderSampler:
    return GlobalOrderSampler(samples, batch_size=_BATCH_SIZE, rank=ranks // 2, world_size=ranks)


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _steps(turns: int) -> list[str]:
    """Return a table of microseconds of CPU time per step of an entire epoch with its start, in one thread."""
    lines = [
        "| samples, ranks | us per step | with torch's DistributedSampler | ratio (goal: at most 1) |",
        "|---|---|---|---|",
    ]
    for samples, ranks in _SMALL:
        ours, torchs = [], []
        for _ in range(turns + 1):
            ours.append(_microseconds_per_step(iter(_rank(samples, ranks))))
            torchs.append(_microseconds_per_step(_distributed(samples, ranks)))
        ratio = statistics.median(own / other for own, other in zip(ours[1:], torchs[1:], strict=True))
        own, other = statistics.median(ours[1:]), statistics.median(torchs[1:])
        lines.append(f"| {samples:,}, {ranks} | {own:.2f} | {other:.2f} | {ratio:.2f} |")
    return lines


def _distributed(samples: int, ranks: int) -> Iterator[list[int]]:
    sampler = DistributedSampler(range(samples), num_replicas=ranks, rank=ranks // 2)
    return iter(BatchSampler(sampler, _BATCH_SIZE, drop_last=False))


def _microseconds_per_step(batches: Iterator[list[int]]) -> float:
    began = time.process_time()
    steps = sum(1 for _ in batches)
    return (time.process_time() - began) / steps * 1e6


if __name__ == "__main__":
    main()
