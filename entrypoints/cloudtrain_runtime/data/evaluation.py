"""Data of an evaluation: every sample of a split exactly once over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from cloudtrain_runtime.data.loader import (
    Collate,
    load_in_process,
    make_loader,
    to_device,
    worker_count,
)
from cloudtrain_runtime.data.position import MicroBatch
from cloudtrain_runtime.data.samplers import EvaluationShards
from cloudtrain_runtime.process.run_context import Context


class EvaluationData(ABC):
    """The batches of a split, for any number of iterations: `for micro, batch in evaluation`.

    A batch with `micro.count == 0` holds one placeholder sample, which does not count.

    Attributes:
        samples: Samples of all ranks; for a stream, known after an iteration.
    """

    samples: int

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's batches, on its device."""

    @abstractmethod
    def close(self) -> None:
        """End the loader's workers."""


class MapEvaluationData(EvaluationData):
    """A map-style split.

    Args:
        dataset: Dataset with `__len__` and `__getitem__`.
        shards: This rank's share of it.
        collate: The Task's collate function.
        context: This rank's context.
        workers: As for `make_feeder`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        shards: EvaluationShards,
        collate: Collate,
        context: Context,
        *,
        workers: int | None = None,
    ) -> None:
        self.samples = shards.length
        self._dataset, self._shards, self._collate, self._context = dataset, shards, collate, context
        self._workers = worker_count(context, workers)
        self._loader: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        if self._loader is None and (self._workers or self._context.device.type != "cpu"):
            self._loader = make_loader(self._dataset, self._shards, self._collate, self._context, workers=self._workers)
        loaded_here = load_in_process(self._dataset, self._shards, self._collate)
        loaded = loaded_here if self._loader is None else self._loader
        for micro, batch in zip(self._shards.micro_batches, loaded, strict=True):
            yield micro, to_device(batch, self._context.device)

    def close(self) -> None:
        """End the loader's workers."""
        self._loader = None
