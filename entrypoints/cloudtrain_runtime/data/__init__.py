"""Which samples a rank sees, when, and how they get to its device."""

from __future__ import annotations

from cloudtrain_runtime.data.evaluation import Evaluation
from cloudtrain_runtime.data.feeding import Feeder, MapFeeder, Step
from cloudtrain_runtime.data.files import FileStream
from cloudtrain_runtime.data.iterables import is_iterable
from cloudtrain_runtime.data.loading import make_loader, to_device
from cloudtrain_runtime.data.making import make_evaluation, make_feeder
from cloudtrain_runtime.data.position import DataState, GlobalBatch, MicroBatch, Position, agree_global_batch
from cloudtrain_runtime.data.sampling import EvaluationShards, GlobalOrderSampler, ShardSampler

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
