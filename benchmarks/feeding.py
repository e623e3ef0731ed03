"""Measure the cost of loading a step's data: cloudtrain, and a plain DataLoader with torch's DistributedSampler.

    .venv/bin/python benchmarks/feeding.py [--turns 5] [--write FILE]

Microseconds of the rank's CPU time per step of an entire epoch. The batches are not used, so that only sampler, loader
and glue code count. The variants alternate; a stream reads the same samples from files.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, replace_marked
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from cloudtrain_runtime import FileStream
from cloudtrain_runtime.data import Feeder, Loading, ReaderShare, make_feeder
from cloudtrain_runtime.process.run_context import read_context

_SAMPLES, _BATCH, _FILES = 8_000, 32, 8


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


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", type=Path, help="file whose marked part the figures replace")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # as in a rank under torchrun
    inputs = torch.randn(_SAMPLES, 64)
    with tempfile.TemporaryDirectory() as folder:
        for index, part in enumerate(inputs.chunk(_FILES)):
            torch.save(part.clone(), Path(folder) / f"part-{index:03d}.pt")
        lines = [
            "| dataset, workers | us per step | plain DataLoader | ratio (goal: at most 1) |",
            "|---|---|---|---|",
            *_rows(inputs, Path(folder), chosen.turns),
        ]
    about = f"Medians of {chosen.turns} turns of {_SAMPLES // _BATCH} steps of {_BATCH} samples in one rank"
    text = "\n".join([*lines, "", f"{about}, on {describe_machine()}, torch {torch.__version__}, one thread."])
    print(text)
    if chosen.write:
        replace_marked(chosen.write, text)


def _rows(inputs: torch.Tensor, folder: Path, turns: int) -> Iterator[str]:
    pairs, by_batch = TensorDataset(inputs, inputs), BatchIndexed(inputs)
    yield _row("pairs of tensors, 0", lambda: _ours(pairs, 0), lambda: _plain(pairs, 0), turns)
    yield _row("indexed by the batch, 0", lambda: _ours(by_batch, 0), lambda: _plain(by_batch, 0), turns)
    yield _row("pairs of tensors, 1", lambda: _ours(pairs, 1), lambda: _plain(pairs, 1), turns)
    for shuffle in (0, 64):
        stream = FileStream(folder, _read, shuffle=shuffle)
        yield _row(f"FileStream, shuffle {shuffle}, 0", lambda: _ours(stream, 0), lambda: _plain(pairs, 0), turns)  # noqa: B023 (called at once)


def _read(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for sample in torch.load(path, weights_only=True):
        yield sample, sample


def _row(what: str, ours: Callable[[], float], plain: Callable[[], float], turns: int) -> str:
    figures = [(ours(), plain()) for _ in range(turns + 1)][1:]
    own, other = (statistics.median(column) for column in zip(*figures, strict=True))
    ratio = statistics.median(a / b for a, b in figures)
    return f"| {what} | {own:.1f} | {other:.1f} | {ratio:.2f} |"


def _ours(dataset: Dataset[Any], workers: int) -> float:
    context = replace(read_context({}), seed=3)
    collate = _as_it_is if isinstance(dataset, BatchIndexed) else default_collate
    feeder = make_feeder(dataset, context, ReaderShare(0, 1), Loading(collate, _BATCH, workers=workers))
    if workers:
        _epoch(feeder)  # workers are reused over the epochs of a run
    began = time.process_time()
    steps = _epoch(feeder)
    seconds = time.process_time() - began
    feeder.close()
    return seconds / steps * 1e6


def _epoch(feeder: Feeder) -> int:
    steps = 0
    for step in feeder.epoch():
        for _micro, _batch in step:
            steps += 1
        feeder.advance()
    return steps


def _plain(dataset: Dataset[Any], workers: int) -> float:
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(
        dataset,
        batch_size=_BATCH,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_as_it_is if isinstance(dataset, BatchIndexed) else None,
    )
    if workers:
        sum(1 for _ in loader)
    began = time.process_time()
    sampler.set_epoch(1)
    steps = sum(1 for _ in loader)
    return (time.process_time() - began) / steps * 1e6


def _as_it_is(batch: Any) -> Any:
    return batch


if __name__ == "__main__":
    main()
