"""Data path: samplers, loaders, streams, and the position in the data."""

from __future__ import annotations

from cloudtrain_runtime.data.factory import make_evaluation_data, make_feeder
from cloudtrain_runtime.data.feeder import Feeder, Step
from cloudtrain_runtime.data.file_stream import FileStream
from cloudtrain_runtime.data.iterable_dataset import is_iterable
from cloudtrain_runtime.data.loader import Loading, make_loader
from cloudtrain_runtime.data.position import DataState, Position, resolve_global_batch
from cloudtrain_runtime.data.samplers import EvaluationShards, GlobalOrderSampler
from cloudtrain_runtime.data.stream_source import ReaderShare

__all__ = [
    "DataState",
    "EvaluationShards",
    "Feeder",
    "FileStream",
    "GlobalOrderSampler",
    "Loading",
    "Position",
    "ReaderShare",
    "Step",
    "is_iterable",
    "make_evaluation_data",
    "make_feeder",
    "make_loader",
    "resolve_global_batch",
]
