"""Measure the cost of loading a step's data: cloudtrain, and a plain DataLoader with torch's DistributedSampler.

    .venv/bin/python benchmarks/feeding.py [--rounds 5] [--write FILE]

Microseconds of the rank's CPU time per step of an entire epoch. The batches are not used, so that only sampler, loader
and glue code count. The variants alternate; a stream reads the same samples from files.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import Benchmark, Peer, Session, alternate, markdown_table, seconds_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from cloudtrain_runtime import FileStream
from cloudtrain_runtime.data import Feeder, Loading, ReaderShare, make_feeder
from cloudtrain_runtime.process.run_context import read_context

_SAMPLES, _BATCH, _FILES = 8_000, 32, 8
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a plain DataLoader with torch's DistributedSampler",
    goal="at most the plain loader's time",
    mechanism=f"both loaders gave each of the {_SAMPLES // _BATCH} steps of the epoch",
    rounds=5,
    packages=("torch",),
)


class BatchIndexed(Dataset[Any]):
    """Tensors that are indexed by an entire batch at once, so that mostly the loader's own cost remains."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.inputs[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.inputs[indices]


def measure(session: Session) -> list[str]:
    """Return the table: microseconds of CPU time per step."""
    torch.set_num_threads(1)  # as in a rank under torchrun
    inputs = torch.randn(_SAMPLES, 64)
    pairs, by_batch = TensorDataset(inputs, inputs), BatchIndexed(inputs)
    with tempfile.TemporaryDirectory() as folder:
        for index, part in enumerate(inputs.chunk(_FILES)):
            torch.save(part.clone(), Path(folder) / f"part-{index:03d}.pt")
        cases: list[tuple[str, Dataset[Any], Dataset[Any], int]] = [
            ("pairs of tensors, 0", pairs, pairs, 0),
            ("indexed by the batch, 0", by_batch, by_batch, 0),
            ("pairs of tensors, 1", pairs, pairs, 1),
        ]
        for shuffle in (0, 64):
            stream = FileStream(Path(folder), _read, shuffle=shuffle)
            cases.append((f"FileStream, shuffle {shuffle}, 0", stream, pairs, 0))
        rows = [_row(session, *case) for case in cases]
    headings = ("dataset, workers", "us per step", "plain DataLoader", "ratio (goal: at most 1)")
    about = f"{_SAMPLES // _BATCH} steps of {_BATCH} samples in one rank with one thread."
    return [*markdown_table(headings, rows), "", about]


def _row(
    session: Session, title: str, own: Dataset[Any], other: Dataset[Any], workers: int
) -> list[str]:
    def peer(name: str, epoch: Callable[[], float]) -> Peer:
        return Peer(name, lambda: epoch() * 1e6)

    ours = peer("cloudtrain", lambda: _ours(session, own, workers))
    theirs = peer("plain", lambda: _plain(session, other, workers))
    first, second = alternate([ours, theirs], session.rounds)
    return [title, f"{first.median():.1f}", f"{second.median():.1f}", f"{first.ratio(second):.2f}"]


def _read(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for sample in torch.load(path, weights_only=True):
        yield sample, sample


def _ours(session: Session, dataset: Dataset[Any], workers: int) -> float:
    context = replace(read_context({}), seed=3)
    collate = _as_it_is if isinstance(dataset, BatchIndexed) else default_collate
    feeder = make_feeder(
        dataset, context, ReaderShare(0, 1), Loading(collate, _BATCH, workers=workers)
    )
    seconds = _per_step(session, lambda: _epoch(feeder), workers)
    feeder.close()
    return seconds


def _epoch(feeder: Feeder) -> int:
    steps = 0
    for step in feeder.epoch():
        steps += sum(1 for _ in step)
        feeder.advance()
    return steps


def _plain(session: Session, dataset: Dataset[Any], workers: int) -> float:
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(
        dataset,
        batch_size=_BATCH,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_as_it_is if isinstance(dataset, BatchIndexed) else None,
    )
    return _per_step(session, lambda: sum(1 for _ in loader), workers)


def _per_step(session: Session, epoch: Callable[[], int], workers: int) -> float:
    """Return the CPU seconds per step of an epoch."""
    if workers:
        epoch()  # workers are reused over the epochs of a run
    steps: list[int] = []
    seconds = seconds_of(lambda: steps.append(epoch()), time.process_time)
    session.require(steps == [_SAMPLES // _BATCH], f"an epoch has had {steps} steps")
    return seconds / steps[0]


def _as_it_is(batch: Any) -> Any:
    return batch


if __name__ == "__main__":
    BENCHMARK.main(measure)
