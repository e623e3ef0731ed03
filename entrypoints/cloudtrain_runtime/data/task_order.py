"""The order of samples that a Task's own sampler draws."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.seeds import IsolatedRandomState, random_number


class TaskOrder:
    """The order of one epoch.

    Args:
        sampler: Yields the indices of an epoch.
        samples: Samples in the dataset.
        seed: Seed of the run's order.
        epoch: Epoch, from 0.

    Raises:
        TaskError: the sampler yields something other than indices of the dataset, or not as many as its length.
    """

    def __init__(self, sampler: Iterable[int], samples: int, seed: int, epoch: int) -> None:
        drawn = random_number(seed, epoch) >> 1
        any_sampler: Any = sampler
        with IsolatedRandomState(drawn):
            if hasattr(any_sampler, "set_epoch"):
                any_sampler.set_epoch(epoch)
            if isinstance(getattr(any_sampler, "generator", None), torch.Generator):
                any_sampler.generator.manual_seed(drawn)
            indices = list(sampler)
        wrong = next((index for index in indices if not hasattr(index, "__index__")), None)
        if wrong is not None:
            raise TaskError(
                f"sampler() must yield the index of one sample at a time; it yielded a {type(wrong).__name__} "
                "(cloudtrain makes the batches)"
            )
        if len(indices) != len(any_sampler):
            raise TaskError(
                f"sampler() must yield as many indices as its length in each epoch: its length is {len(any_sampler)}, "
                f"and it yielded {len(indices)} in epoch {epoch}"
            )
        self._indices = torch.tensor([int(index) for index in indices])
        least, most = int(self._indices.min()), int(self._indices.max())
        if least < 0 or most >= samples:
            raise TaskError(f"sampler() must yield indices from 0 to {samples - 1}; it yielded {least} to {most}")

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at some positions of the order."""
        return self._indices[positions]

    @property
    def checksum(self) -> int:
        """A number that differs for another order."""
        return int((self._indices * torch.arange(1, len(self._indices) + 1)).sum())
