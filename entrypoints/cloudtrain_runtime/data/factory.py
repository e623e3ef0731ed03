"""Feeder and evaluation data for each kind of dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset

from cloudtrain_runtime.data.feeder import MapFeeder
from cloudtrain_runtime.data.file_stream import FileSource, FileStream
from cloudtrain_runtime.data.iterable_dataset import IterableSource, is_iterable
from cloudtrain_runtime.data.loader import (
    Loader,
    Loading,
    load_in_process,
    make_loader,
    to_device,
    worker_count,
)
from cloudtrain_runtime.data.position import MicroBatch, Position, ReaderShare, check_full_steps
from cloudtrain_runtime.data.samplers import EvaluationShards
from cloudtrain_runtime.data.stream_feeder import StreamFeeder, StreamSource
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

Feeder = MapFeeder | StreamFeeder
"""The samples of one rank, step by step."""


def make_feeder(
    dataset: Dataset[Any], context: Context, share: ReaderShare, loading: Loading
) -> Feeder:
    """Return the feeder of a dataset: map-style, iterable, or a FileStream. All ranks call this together."""
    if is_iterable(dataset):
        return _stream_feeder(dataset, context, share, loading)
    return MapFeeder(dataset=dataset, context=context, share=share, loading=loading)


def _stream_feeder(
    dataset: Dataset[Any], context: Context, share: ReaderShare, loading: Loading
) -> StreamFeeder:
    global_size = loading.batch_size * loading.accumulate * share.size
    source = _source_of(dataset, context, share, global_size)
    most = source.most_workers
    asked = loading.workers
    if context.is_main and source.note is not None:
        log_line(source.note)
    if context.is_main and asked is not None and asked > most:
        kind = type(dataset).__name__
        log_line(
            f"{kind}: each rank uses {most} of {asked} workers, because there is no data for more"
        )
    workers = min(worker_count(context, asked), most)
    return StreamFeeder(
        source=source, context=context, share=share, loading=replace(loading, workers=workers)
    )


def _source_of(
    dataset: Any, context: Context, share: ReaderShare, global_size: int
) -> StreamSource:
    if not isinstance(dataset, FileStream):
        return IterableSource(dataset, share, global_size)
    if not dataset.sharded:
        return FileSource(dataset, share)
    readers = gather((context.host, share.rank), context)
    hosts = sorted({host for host, _ in readers})
    here = sorted({rank for host, rank in readers if host == context.host})
    ranks_of_hosts = [{rank for name, rank in readers if name == host} for host in hosts]
    # A rank's share on two hosts would be read from different files.
    if len({rank for _, rank in readers}) < sum(map(len, ranks_of_hosts)):
        raise TaskError(
            "ranks that share their samples are on several hosts, which have different files: use a channel with "
            "sharded: false, or tensor and pipeline parallelism within a host"
        )
    return FileSource(
        stream=dataset,
        share=ReaderShare(here.index(share.rank), len(here)),
        host=hosts.index(context.host),
        hosts=len(hosts),
    )


def make_evaluation_data(
    dataset: Dataset[Any], context: Context, share: ReaderShare, loading: Loading, *, even: bool
) -> _MapEvaluation | _StreamEvaluation:
    """Return the batches of a split on this rank's device, for any number of iterations. All ranks call this together.

    Every sample of the split is in one rank's batches: `for micro, batch in evaluation`. A batch with
    `micro.count == 0` holds one placeholder sample, which does not count. `evaluation.samples` counts the samples of
    all ranks, for a stream after an iteration.

    Args:
        dataset: Map-style, iterable, or a FileStream.
        context: This rank's context.
        share: This rank's share of the samples.
        loading: How batches are loaded; seed and accumulate do not matter.
        even: Whether all ranks must have the same number of batches, because the forward pass communicates. A stream
            always gives the same number.
    """
    if is_iterable(dataset):
        once = replace(loading, accumulate=1, seed=0)
        return _StreamEvaluation(_stream_feeder(dataset, context, share, once))
    return _MapEvaluation(dataset, context, share, loading, even=even)


class _MapEvaluation:
    def __init__(
        self,
        dataset: Dataset[Any],
        context: Context,
        share: ReaderShare,
        loading: Loading,
        *,
        even: bool,
    ) -> None:
        self.samples = len(dataset)  # type: ignore[arg-type]
        if loading.drop_last:
            check_full_steps(share.size, share.size, self.samples)
            self.samples -= self.samples % share.size
        self._shards = EvaluationShards(
            self.samples,
            batch_size=loading.batch_size,
            data_rank=share.rank,
            data_size=share.size,
            even=even,
        )
        self._dataset = dataset
        self._collate = loading.collate
        self._context = context
        self._workers = worker_count(context, loading.workers)
        self._loader: Loader | None = None

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        if self._loader is None and (self._workers or self._context.device.type != "cpu"):
            self._loader = make_loader(
                self._dataset, self._shards, self._collate, self._context, workers=self._workers
            )
        loaded_here = load_in_process(self._dataset, self._shards, self._collate)
        loaded = loaded_here if self._loader is None else self._loader
        for micro, batch in zip(self._shards.micro_batches, loaded, strict=True):
            yield micro, to_device(batch, self._context.device)

    def close(self) -> None:
        """End the loader's workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None


class _StreamEvaluation:
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
