"""Measure the cost of loading a step's data: cloudtrain, and a plain DataLoader with torch's DistributedSampler.

    .venv/bin/python benchmarks/feeding.py [--rounds 5] [--peers PYTHON] [--write FILE]

Microseconds of the rank's CPU time per step of an entire epoch. The batches are not used, so that only sampler, loader
and glue code count. The variants alternate; a stream reads the same samples from files. With --peers, other libraries
read them from files, too, each in the form that it reads best (feeding_peers.py).

A second table has the rate of 4 workers, whose batches are pinned and copied, as for a GPU. A stand-in for an accelerator
lets PyTorch pin without one; the copy is one in memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from feeding_peers import PEERS
from loop_models import Shape, Windows
from measure import Benchmark, Peer, Session, alternate, markdown_table, seconds_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from cloudtrain_runtime import FileStream
from cloudtrain_runtime.data import Feeder, Loading, ReaderShare, loader, make_feeder
from cloudtrain_runtime.process.run_context import read_context

_SAMPLES, _BATCH, _FILES = 8_000, 32, 8
_WORKERS, _WINDOWS = 4, 16_000
# Only the samples of this model are used.
_SHAPE = Shape(layers=1, heads=1, width=1, vocabulary=50_304, context=256)
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a plain DataLoader with torch's DistributedSampler; torchdata, webdataset and mosaicml-streaming",
    goal="at most the plain loader's time; a FileStream at most 1.5 times, and less than the other libraries'",
    mechanism=f"both loaders gave each of the {_SAMPLES // _BATCH} steps of the epoch",
    rounds=5,
    options={
        "peers": (
            "",
            "a Python with torchdata, webdataset and mosaicml-streaming; without it, they are left out",
        )
    },
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
        files = Path(folder) / "pt"
        files.mkdir()
        for index, part in enumerate(inputs.chunk(_FILES)):
            torch.save(part.clone(), files / f"part-{index:03d}.pt")
        cases: list[tuple[str, Dataset[Any], Dataset[Any], int]] = [
            ("pairs of tensors, 0", pairs, pairs, 0),
            ("indexed by the batch, 0", by_batch, by_batch, 0),
            ("pairs of tensors, 1", pairs, pairs, 1),
        ]
        for shuffle in (0, 64):
            stream = FileStream(files, _read, shuffle=shuffle)
            cases.append((f"FileStream, shuffle {shuffle}, 0", stream, pairs, 0))
        rows = [_row(session, *case) for case in cases]
        peers = _peers(session, Path(folder)) if session.options.peers else []
    headings = ("dataset, workers", "us per step", "plain DataLoader", "ratio (goal: at most 1)")
    about = f"{_SAMPLES // _BATCH} steps of {_BATCH} samples in one rank with one thread."
    return [*markdown_table(headings, rows), "", about, "", *peers, *_rates(session, pairs)]


def _peers(session: Session, folder: Path) -> list[str]:
    """Return the table of libraries that read the samples from files, in one process without workers."""
    python = session.options.peers
    program = [python, "-W", "ignore", str(Path(__file__).with_name("feeding_peers.py"))]
    subprocess.run([*program, "write", folder], check=True)
    rows = []
    for shuffle in (0, 64):
        stream = FileStream(folder / "pt", _read, shuffle=shuffle)
        ours = Peer("cloudtrain FileStream", lambda: _ours(session, stream, 0) * 1e6)  # noqa: B023
        peers = [
            Peer(name, functools.partial(_microseconds, session, program, name, folder, shuffle))
            for name in PEERS
        ]
        found = alternate([ours, *peers], session.rounds, warm_up=False)
        rows += [[f"{each.name}, shuffle {shuffle}", f"{each.median():.1f}"] for each in found]
    headings = ("samples from files", "us per step")
    return [*markdown_table(headings, rows), ""]


def _microseconds(
    session: Session, program: Sequence[str], name: str, folder: Path, shuffle: int
) -> float:
    """Return the microseconds per step of an epoch that another library reads."""
    done = subprocess.run(
        [*program, name, folder, str(shuffle)], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    session.require(found["samples"] == _SAMPLES, f"{name} has read {found['samples']} samples")
    return float(found["us"])


def _rates(session: Session, pairs: Dataset[Any]) -> list[str]:
    """Return the table of samples per second with workers, pinned batches and a copy."""
    rows = []
    for title, data, samples in (
        ("windows of tokens", Windows(_SHAPE, _WINDOWS), _WINDOWS),
        ("pairs of tensors", pairs, _SAMPLES),
    ):
        with _pinning_without_accelerator():
            ours = Peer("cloudtrain", _rate(session, _fed(data), samples))
            theirs = Peer("plain", _rate(session, _loaded(data), samples))
            first, second = alternate([ours, theirs], session.rounds)
        rates = [f"{each.median():,.0f}" for each in (first, second)]
        rows.append([title, *rates, f"{first.ratio(second):.2f}"])
    headings = ("dataset", "samples/s", "plain DataLoader", "ratio (goal: at least 1)")
    about = f"{_WORKERS} workers, batches of {_BATCH}, pinned and copied; epochs of a loader that runs already."
    return [*markdown_table(headings, rows), "", about]


@contextlib.contextmanager
def _pinning_without_accelerator() -> Iterator[None]:
    """Let DataLoaders start their thread that pins, where there is nothing to pin for."""
    plain = torch.Tensor.pin_memory
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
    owner = getattr(torch, "accelerator", torch.cuda)
    found, owner.is_available = owner.is_available, lambda: True
    names = ("current_device", "set_device", "current_device_index", "set_device_index")
    others = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    for name in others:
        setattr(owner, name, lambda *_: 0)
    kind = getattr(owner, "current_accelerator", None)
    if kind is not None:
        owner.current_accelerator = lambda *_, **__: torch.device("cuda")
    try:
        yield
    finally:
        torch.Tensor.pin_memory = plain  # type: ignore[method-assign]
        owner.is_available = found
        for name, value in others.items():
            setattr(owner, name, value)
        if kind is not None:
            owner.current_accelerator = kind


def _fed(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yield batches as the training loop gets them on a GPU, for any number of epochs."""
    context = replace(read_context({}), seed=3)
    loading = Loading(default_collate, _BATCH, workers=_WORKERS)
    with mock.patch.object(loader, "loader_options", _pinned(loader.loader_options)):
        feeder = make_feeder(dataset, context, ReaderShare(0, 1), loading)
        while True:
            for step in feeder.epoch():
                for _, batch in step:
                    yield [each.clone() for each in batch]
                feeder.advance()


def _pinned(plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments: {**plain(*arguments), "pin_memory": True}


def _loaded(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yield batches of a plain DataLoader, for any number of epochs."""
    batches = DataLoader(
        dataset,
        _BATCH,
        shuffle=True,
        num_workers=_WORKERS,
        persistent_workers=True,
        pin_memory=True,
    )
    while True:
        for batch in batches:
            yield [each.clone() for each in batch]


def _rate(session: Session, batches: Iterator[Any], samples: int) -> Callable[[], float]:
    """Return a function that loads an epoch and returns its samples per second."""
    steps = samples // _BATCH
    next(batches)  # starts the workers

    def run() -> float:
        seconds = seconds_of(lambda: [next(batches) for _ in range(steps)], time.perf_counter)
        return samples / seconds

    session.require(len(multiprocessing.active_children()) >= _WORKERS, "no workers run")
    return run


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
