"""Which samples a rank sees, when, and how they get to its device."""

from __future__ import annotations

from cloudtrain_runtime.data.evaluation import Evaluation, make_evaluation
from cloudtrain_runtime.data.feeding import Feeder, MapFeeder, Step, make_feeder
from cloudtrain_runtime.data.loading import ignore_stop_signals, make_loader, to_device
from cloudtrain_runtime.data.position import DataState, GlobalBatch, MicroBatch, Position, agree_global_batch
from cloudtrain_runtime.data.sampling import EvaluationShards, GlobalOrderSampler, ShardSampler

__all__ = [
    "DataState",
    "Evaluation",
    "EvaluationShards",
    "Feeder",
    "GlobalBatch",
    "GlobalOrderSampler",
    "MapFeeder",
    "MicroBatch",
    "Position",
    "ShardSampler",
    "Step",
    "agree_global_batch",
    "ignore_stop_signals",
    "make_evaluation",
    "make_feeder",
    "make_loader",
    "to_device",
]
