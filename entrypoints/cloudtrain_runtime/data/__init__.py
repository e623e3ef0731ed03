"""Data path: samplers, loaders, streams, and the position in the data."""

from __future__ import annotations

from cloudtrain_runtime.data.evaluation import EvaluationData
from cloudtrain_runtime.data.factory import make_evaluation_data, make_feeder
from cloudtrain_runtime.data.feeder import Feeder, MapFeeder, Step
from cloudtrain_runtime.data.file_stream import FileStream
from cloudtrain_runtime.data.iterable_dataset import is_iterable
from cloudtrain_runtime.data.loader import make_loader, to_device
from cloudtrain_runtime.data.position import (
    DataState,
    GlobalBatch,
    MicroBatch,
    Position,
    resolve_global_batch,
)
from cloudtrain_runtime.data.samplers import EvaluationShards, GlobalOrderSampler, ShardSampler

__all__ = [
    "DataState",
    "EvaluationData",
    "EvaluationShards",
    "Feeder",
    "FileStream",
    "GlobalBatch",
    "GlobalOrderSampler",
    "MapFeeder",
    "MicroBatch",
    "Position",
    "ShardSampler",
    "Step",
    "is_iterable",
    "make_evaluation_data",
    "make_feeder",
    "make_loader",
    "resolve_global_batch",
    "to_device",
]
