"""Ranks that read a stream: real processes with real Gloo, forked from one that has imported torch.

Their code is in this module because the fork server must import it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.data import (
    DataState,
    Loading,
    ReaderShare,
    make_evaluation_data,
    make_feeder,
)
from cloudtrain_runtime.data.file_stream import FileStream
from support.fork_server import fork_server

_SECONDS = 60


@dataclass(frozen=True)
class Reading:
    """One start of ranks that read a stream.

    Attributes:
        ranks: Number of processes.
        folder: Folder for the results of the ranks.
        files: Folder of text files with numbers; with several hosts, a folder with one such folder `host-N` per host.
        length: Length of an iterable dataset to read instead of files, if not 0.
        steps: Optimizer steps after which the ranks stop.
        epochs: Epochs after which the ranks stop.
        workers: Data workers of each rank.
        saved: Position to continue from.
        hosts: Number of hosts.
        copies: Number of ranks that read the same samples.
        shuffle: Size of the shuffle buffer.
    """

    ranks: int
    folder: Path
    files: Path = Path()
    length: int = 0
    steps: int | None = None
    epochs: int = 1
    workers: int = 0
    saved: Mapping[str, Any] | None = None
    hosts: int = 1
    copies: int = 1
    shuffle: int = 0


@dataclass(frozen=True)
class Found:
    """The samples that the ranks have read.

    Attributes:
        steps: For each optimizer step and rank, the samples that it used and the number of samples in the plan.
        evaluated: For each rank, the samples of two evaluations and the number of batches.
        states: Position of each rank at the end.
        failures: Messages of failed ranks.
    """

    steps: list[list[tuple[list[int], int]]]
    evaluated: list[tuple[list[int], int]]
    states: list[dict[str, Any]]
    failures: list[str]

    @property
    def used(self) -> list[int]:
        """All samples, sorted."""
        return sorted(sample for step in self.steps for own, _ in step for sample in own)


class Numbers(IterableDataset[int]):
    """Numbers in an order that is random in each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


def read_numbers(path: Path) -> list[int]:
    """Return the numbers of a file."""
    return [int(word) for word in path.read_text().split()]


def read_by_ranks(reading: Reading) -> Found:
    """Run ranks that read `steps` optimizer steps, or all epochs."""
    reading.folder.mkdir(parents=True, exist_ok=True)
    ready = fork_server("cloudtrain_runtime.training.trainer", "support.streams")
    port = free_port()
    processes = [
        ready.Process(target=_rank, args=(reading, rank, port)) for rank in range(reading.ranks)
    ]
    for process in processes:
        process.start()
    left = [process.sentinel for process in processes]
    while left:
        ended = wait(left, timeout=_SECONDS)
        if not ended:
            for process in processes:
                process.kill()
            raise AssertionError("the ranks hang")
        left = [sentinel for sentinel in left if sentinel not in ended]
    results = [
        json.loads((reading.folder / f"rank-{rank}").read_text()) for rank in range(reading.ranks)
    ]
    steps = [list(step) for step in zip(*(each["steps"] for each in results), strict=True)]
    failures = [each["failure"] for each in results if each["failure"]]
    return Found(
        steps,
        [each["evaluated"] for each in results],
        [each["state"] for each in results],
        failures,
    )


def _rank(reading: Reading, rank: int, port: int) -> None:
    """Run one rank, and end its process."""
    import warnings

    from cloudtrain_runtime.errors import JobError
    from cloudtrain_runtime.process import process_group
    from cloudtrain_runtime.process.run_context import read_context

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(reading.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK="0",
    )
    host = rank * reading.hosts // reading.ranks
    names = tuple(f"host-{index}" for index in range(reading.hosts))
    context = replace(read_context(os.environ), seed=3, host=names[host], hosts=names)
    process_group.join_ranks(context)
    results: dict[str, Any] = {"steps": [], "evaluated": [[], 0], "state": None, "failure": ""}
    try:
        _read(reading, context, host, results)
    except JobError as error:
        results["failure"] = str(error)
    (reading.folder / f"rank-{rank}").write_text(json.dumps(results))
    torch.distributed.barrier()  # a rank that exits early would break ranks that are still joining
    os._exit(0)


def _read(reading: Reading, context: Any, host: int, results: dict[str, Any]) -> None:
    dataset: Any = Numbers(reading.length)
    if not reading.length:
        own = reading.files / f"host-{host}" if reading.hosts > 1 else reading.files
        dataset = FileStream(
            own, read_numbers, lanes=6, shuffle=reading.shuffle, sharded=reading.hosts > 1
        )
    share = ReaderShare(context.rank // reading.copies, reading.ranks // reading.copies)
    loading = Loading(list, batch_size=3, accumulate=2, seed=5, workers=reading.workers)
    feeder = make_feeder(dataset, context, share, loading)
    if reading.saved is not None:
        feeder.resume(DataState.from_json(reading.saved))
    taken = 0
    while feeder.position.epoch < reading.epochs and taken != reading.steps:
        for step in feeder.epoch():
            batches = list(step)
            used = [sample for micro, batch in batches for sample in batch[: micro.count]]
            assert [len(batch) for _, batch in batches] == [micro.samples for micro, _ in batches]
            results["steps"].append([used, step.plan.samples])
            feeder.advance()
            taken += 1
            if taken == reading.steps:
                break
    results["state"] = feeder.state().to_json()
    loading = Loading(list, batch_size=4, workers=reading.workers)
    evaluation = make_evaluation_data(dataset, context, share, loading, even=True)
    for _ in range(2):
        for micro, batch in evaluation:
            results["evaluated"][0] += batch[: micro.count]
            results["evaluated"][1] += 1
    feeder.close()
    evaluation.close()
