"""Feeder and evaluation data for each kind of dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from cloudtrain_runtime.data.evaluation import EvaluationData, MapEvaluationData
from cloudtrain_runtime.data.feeder import Feeder, MapFeeder
from cloudtrain_runtime.data.file_stream import FileSource, FileStream
from cloudtrain_runtime.data.iterable_dataset import IterableSource, is_iterable
from cloudtrain_runtime.data.loader import PREFETCH, Collate, worker_count
from cloudtrain_runtime.data.position import MicroBatch, Position
from cloudtrain_runtime.data.samplers import EvaluationShards, GlobalOrderSampler
from cloudtrain_runtime.data.stream_feeder import StreamFeeder
from cloudtrain_runtime.data.stream_source import ReaderShare, StreamSource
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context


def make_feeder(
    dataset: Dataset[Any],
    collate: Collate,
    context: Context,
    *,
    batch_size: int,
    accumulate: int,
    data_rank: int,
    data_size: int,
    seed: int = 0,
    workers: int | None = None,
    prefetch: int = PREFETCH,
) -> Feeder:
    """Return the feeder of a dataset. All ranks call this together.

    Args:
        dataset: Map-style, iterable, or a FileStream.
        collate: The Task's collate function.
        context: This rank's context.
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        data_rank: Index of this rank's share of the data: its rank, unless several ranks read the same samples.
        data_size: Number of shares of the data.
        seed: Seed of the order of samples.
        workers: Loader processes of this rank; None means up to 8 with a GPU, and none without.
        prefetch: Batches that each worker loads ahead.
    """
    if not is_iterable(dataset):
        sampler = GlobalOrderSampler(
            len(dataset),  # type: ignore[arg-type]
            batch_size=batch_size,
            accumulate=accumulate,
            seed=seed,
            rank=data_rank,
            world_size=data_size,
        )
        return MapFeeder(dataset, sampler, collate, context, workers=workers, prefetch=prefetch)
    return _stream_feeder(
        dataset,
        collate,
        context,
        ReaderShare(data_rank, data_size),
        batch_size=batch_size,
        accumulate=accumulate,
        seed=seed,
        workers=workers,
        prefetch=prefetch,
    )


def _stream_feeder(
    dataset: Dataset[Any], collate: Collate, context: Context, share: ReaderShare, *, workers: int | None, **how: Any
) -> StreamFeeder:
    source = _source_of(dataset, context, share, how["batch_size"] * how["accumulate"] * share.size)
    most = source.most_workers
    if context.is_main and source.note is not None:
        log_line(source.note)
    if context.is_main and workers is not None and workers > most:
        log_line(
            f"{type(dataset).__name__}: each rank uses {most} of {workers} workers, because there is no data for more"
        )
    return StreamFeeder(source, collate, context, share, workers=min(worker_count(context, workers), most), **how)


def _source_of(dataset: Any, context: Context, share: ReaderShare, global_size: int) -> StreamSource:
    if not isinstance(dataset, FileStream):
        return IterableSource(dataset, share, global_size)
    if not dataset.sharded:
        return FileSource(dataset, share)
    readers = gather((context.host, share.rank), context)
    hosts = sorted({host for host, _ in readers})
    here = sorted({rank for host, rank in readers if host == context.host})
    if len({rank for _, rank in readers}) < sum(len({r for h, r in readers if h == host}) for host in hosts):
        raise TaskError(
            "ranks that share their samples are on several hosts, which have different files: use a channel with "
            "sharded: false, or tensor and pipeline parallelism within a host"
        )
    return FileSource(dataset, ReaderShare(here.index(share.rank), len(here)), hosts.index(context.host), len(hosts))


def make_evaluation_data(
    dataset: Dataset[Any],
    collate: Collate,
    context: Context,
    *,
    batch_size: int,
    data_rank: int,
    data_size: int,
    even: bool,
    workers: int | None = None,
) -> EvaluationData:
    """Return the evaluation data of a split. All ranks call this together.

    Args:
        dataset: Map-style, iterable, or a FileStream.
        collate: The Task's collate function.
        context: This rank's context.
        batch_size: Samples per rank.
        data_rank: Index of this rank's share of the data.
        data_size: Number of shares of the data.
        even: Whether all ranks must have the same number of batches, because the forward pass communicates. A stream
            always gives the same number.
        workers: As for `make_feeder`.
    """
    if not is_iterable(dataset):
        shards = EvaluationShards(
            len(dataset),  # type: ignore[arg-type]
            batch_size=batch_size,
            data_rank=data_rank,
            data_size=data_size,
            even=even,
        )
        return MapEvaluationData(dataset, shards, collate, context, workers=workers)
    feeder = _stream_feeder(
        dataset,
        collate,
        context,
        ReaderShare(data_rank, data_size),
        batch_size=batch_size,
        accumulate=1,
        seed=0,
        workers=workers,
        prefetch=PREFETCH,
    )
    return StreamEvaluationData(feeder)


class StreamEvaluationData(EvaluationData):
    """The batches of a stream; each iteration reads epoch 0."""

    def __init__(self, feeder: StreamFeeder) -> None:
        self._feeder = feeder
        self.samples = 0

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        self._feeder.restart(Position())
        self.samples = 0
        for step in self._feeder.epoch():
            yield from step
            self.samples += step.plan.samples
            self._feeder.advance()

    def close(self) -> None:
        """End the loader's workers."""
        self._feeder.close()
