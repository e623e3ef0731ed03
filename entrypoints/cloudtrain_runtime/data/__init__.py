"""Which samples a rank sees, when, and how they get to its device."""

from __future__ import annotations

from cloudtrain_runtime.data.evaluation import Evaluation
from cloudtrain_runtime.data.factory import make_evaluation, make_feeder
from cloudtrain_runtime.data.feeder import Feeder, MapFeeder, Step
from cloudtrain_runtime.data.file_stream import FileStream
from cloudtrain_runtime.data.iterable_dataset import is_iterable
from cloudtrain_runtime.data.loader import make_loader, to_device
from cloudtrain_runtime.data.position import DataState, GlobalBatch, MicroBatch, Position, agree_global_batch
from cloudtrain_runtime.data.samplers import EvaluationShards, GlobalOrderSampler, ShardSampler

__all__ = [
    "DataState",
    "Evaluation",
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
    "agree_global_batch",
    "is_iterable",
    "make_evaluation",
    "make_feeder",
    "make_loader",
    "to_device",
]
