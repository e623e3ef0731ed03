"""Feeder and evaluation data for each kind of dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset

from cloudtrain_runtime.data.feeder import MapFeeder
from cloudtrain_runtime.data.file_stream import FileSource, FileStream
from cloudtrain_runtime.data.iterable_dataset import IterableSource, is_iterable
from cloudtrain_runtime.data.loader import Loading, worker_count
from cloudtrain_runtime.data.position import MicroBatch, Position, ReaderShare, check_full_steps
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
    dataset: Dataset[Any], context: Context, share: ReaderShare, loading: Loading
) -> EvaluationData:
    """Return the batches of a split on this rank's device, for any number of iterations. All ranks call this together.

    Args:
        dataset: Map-style, iterable, or a FileStream.
        context: This rank's context.
        share: This rank's share of the samples.
        loading: How batches are loaded; seed, accumulate and sampler do not matter.
    """
    once = replace(loading, accumulate=1, seed=0, sampler=None)
    if is_iterable(dataset):
        return EvaluationData(_stream_feeder(dataset, context, share, once))
    samples = len(dataset)  # type: ignore[arg-type]
    if loading.drop_last:
        check_full_steps(share.size, share.size, samples)
        samples -= samples % share.size
        once = replace(once, drop_last=False)
    return EvaluationData(MapFeeder(dataset, context, share, once, evaluated=samples))


class EvaluationData:
    """The batches of a split, in the order of the dataset: `for micro, batch in evaluation`.

    Every sample is in one rank's batches, and all ranks have the same number of batches, because a forward pass may
    communicate. A batch with `micro.count == 0` holds one placeholder sample, which does not count.

    Attributes:
        samples: Samples of all ranks in the last iteration.
    """

    def __init__(self, feeder: Feeder) -> None:
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
