"""Measure how fast a rank computes its samples, saves its position and resumes, and the cost of the sampler per step.

    .venv/bin/python benchmarks/position.py [--samples 1000000000] [--ranks 1024] [--rounds 5] [--write FILE]

The first part measures one rank of many in the middle of an epoch. The second part reads an epoch of a small dataset
with cloudtrain's sampler and with torch's DistributedSampler in a BatchSampler, alternately. It reads lists of indices,
and no data.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from measure import Benchmark, Peer, Session, alternate, markdown_table, seconds_of, table
from torch.utils.data import BatchSampler, DistributedSampler

from cloudtrain_runtime.data import DataState, GlobalOrderSampler, Position

_BATCH_SIZE = 32
_MOST_MILLISECONDS = 50
_MOST_BYTES = 10_000
_SMALL = ((60_000, 1), (60_000, 2), (60_000, 4), (1_000_000, 1), (1_000_000, 8))
"""Samples and ranks of the small datasets."""


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="torch's DistributedSampler in a BatchSampler",
    goal=f"{_MOST_MILLISECONDS} ms and {_MOST_BYTES:,} bytes for a position, at most torch's time per step",
    mechanism="the sampler restored its saved position and gave the samples of the rank's next step",
    rounds=5,
    options={"samples": (10**9, "samples of the large dataset"), "ranks": (1024, "its ranks")},
    packages=("torch",),
)


def measure(session: Session) -> list[str]:
    """Return both tables; exit if a goal of the first is missed."""
    torch.set_num_threads(1)  # as in a rank under torchrun
    return [*_position(session), "", *_steps(session.rounds)]


def _position(session: Session) -> list[str]:
    """Return a table about one rank of many."""
    samples, ranks = session.options.samples, session.options.ranks
    middle = Position(step=samples // (2 * ranks * _BATCH_SIZE), epoch=1, samples=samples // 2)

    def save() -> str:
        sampler = _rank(samples, ranks)
        sampler.position = middle
        return json.dumps(sampler.state_dict())

    saved = save()

    def first() -> Any:
        return next(iter(_rank(samples, ranks)))

    def restore() -> Any:
        sampler = _rank(samples, ranks)
        sampler.resume(DataState.from_json(json.loads(saved)))
        session.require(
            sampler.step == middle.step, f"restored step {sampler.step}, not {middle.step}"
        )
        return next(iter(sampler))

    def peer(name: str, action: Callable[[], Any]) -> Peer:
        return Peer(name, lambda: seconds_of(action) * 1e3, f"{_MOST_MILLISECONDS} ms")

    ways = {"first step of an epoch": first, "save": save, "restore, and the next step": restore}
    found = alternate([peer(name, action) for name, action in ways.items()], session.rounds)
    slowest, size = max(max(each.values()) for each in found), len(saved.encode())
    if slowest > _MOST_MILLISECONDS or size > _MOST_BYTES:
        sys.exit(f"the goal is missed: {slowest:.1f} ms, {size} bytes")
    title = f"position of {ranks:,} ranks in {samples:,} samples"
    return [
        *table(title, found, unit="ms"),
        f"| size of what is saved | {size} bytes | | {_MOST_BYTES:,} bytes |",
    ]


def _rank(samples: int, ranks: int) -> GlobalOrderSampler:
    return GlobalOrderSampler(samples, batch_size=_BATCH_SIZE, rank=ranks // 2, world_size=ranks)


def _steps(rounds: int) -> list[str]:
    """Return a table of microseconds of CPU time per step of an entire epoch with its start, in one thread."""
    rows = []
    for samples, ranks in _SMALL:
        peers = [
            Peer(make.__name__, functools.partial(_microseconds_per_step, make, samples, ranks))
            for make in (_rank, _distributed)
        ]
        own, other = alternate(peers, rounds)
        ratio = f"{own.ratio(other):.2f}"
        rows.append(
            (f"{samples:,}, {ranks}", f"{own.median():.2f}", f"{other.median():.2f}", ratio)
        )
    headings = (
        "samples, ranks",
        "us per step",
        "with torch's DistributedSampler",
        "ratio (goal: at most 1)",
    )
    return markdown_table(headings, rows)


def _distributed(samples: int, ranks: int) -> BatchSampler:
    sampler = DistributedSampler(range(samples), num_replicas=ranks, rank=ranks // 2)
    return BatchSampler(sampler, _BATCH_SIZE, drop_last=False)


def _microseconds_per_step(
    make: Callable[[int, int], Iterable[list[int]]], samples: int, ranks: int
) -> float:
    batches = make(samples, ranks)
    began = time.process_time()
    steps = sum(1 for _ in batches)
    return (time.process_time() - began) / steps * 1e6


if __name__ == "__main__":
    BENCHMARK.main(measure)
