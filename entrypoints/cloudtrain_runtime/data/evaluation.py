"""What an evaluation reads: every sample of a split exactly once over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from cloudtrain_runtime.context import Context
from cloudtrain_runtime.data.loading import Collate, batches_here, make_loader, to_device, workers_of
from cloudtrain_runtime.data.position import MicroBatch
from cloudtrain_runtime.data.sampling import EvaluationShards


class Evaluation(ABC):
    """A split, to be gone through as often as it is iterated: `for micro, batch in evaluation`.

    A batch of which none counts (`micro.count == 0`) has one sample, which only stands in.

    Attributes:
        samples: Of all ranks together; of a stream, when it has been gone through.
    """

    samples: int

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's batches, on its device."""


def make_evaluation(
    dataset: Dataset[Any],
    collate: Collate,
    place: Context,
    *,
    batch_size: int,
    data_rank: int,
    data_size: int,
    even: bool,
    workers: int | None = None,
) -> Evaluation:
    """Return what goes through a split. All ranks call it together.

    Args:
        dataset: Map-style, iterable, or a FileStream.
        collate: The Task's.
        place: This rank's place.
        batch_size: Samples per rank.
        data_rank: Which of the shares of the data this rank reads.
        data_size: How many shares there are.
        even: Whether all ranks must have as many batches: those of a model whose forward pass talks to other ranks.
            A stream always gives as many.
        workers: As for `make_feeder`.
    """
    shards = EvaluationShards(
        len(dataset),  # type: ignore[arg-type]
        batch_size=batch_size,
        data_rank=data_rank,
        data_size=data_size,
        even=even,
    )
    return MapEvaluation(dataset, shards, collate, place, workers=workers)


class MapEvaluation(Evaluation):
    """A map-style split.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        shards: What this rank sees of it.
        collate: The Task's.
        place: This rank's place.
        workers: As for `make_feeder`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        shards: EvaluationShards,
        collate: Collate,
        place: Context,
        *,
        workers: int | None = None,
    ) -> None:
        self.samples = shards.length
        self._dataset, self._shards, self._collate, self._place = dataset, shards, collate, place
        self._loader = None
        if workers_of(place, workers) or place.device.type != "cpu":
            self._loader = make_loader(dataset, shards, collate, place, workers=workers)

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        loaded = self._loader or batches_here(self._dataset, self._shards, self._collate)
        for micro, batch in zip(self._shards.micro_batches, loaded, strict=True):
            yield micro, to_device(batch, self._place.device)
