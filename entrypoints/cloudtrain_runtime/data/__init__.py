"""Data path: samplers, loaders, streams, and the position in the data."""

from __future__ import annotations

from cloudtrain_runtime.data.factory import Feeder, make_evaluation_data, make_feeder
from cloudtrain_runtime.data.feeder import Step
from cloudtrain_runtime.data.file_stream import FileStream
from cloudtrain_runtime.data.iterable_dataset import is_iterable
from cloudtrain_runtime.data.loader import Loading
from cloudtrain_runtime.data.position import DataState, Position, ReaderShare
from cloudtrain_runtime.data.samplers import GlobalOrderSampler

__all__ = [
    "DataState",
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
]
