"""A Task that shuffles without the epoch."""

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler, TensorDataset

from cloudtrain_runtime import Task


class Faulty(Task):
    """A linear regression with 24 samples."""

    def model(self) -> nn.Module:
        """Map inputs [N, 3] to numbers [N, 1]."""
        return nn.Linear(3, 1)

    def datasets(self) -> dict[str, Dataset]:
        """Return the sum of three random numbers."""
        inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error."""
        return F.mse_loss(model(batch[0]), batch[1])

    def sampler(self, dataset: Dataset) -> Sampler[int]:
        """Return an order that depends on how often this process has shuffled, not on the epoch."""
        return Shuffled(len(dataset))


class Shuffled(Sampler[int]):
    """A random order from a generator of its own, which starts again in each process."""

    def __init__(self, samples: int) -> None:
        self.samples, self.numbers = samples, random.Random(0)  # noqa: S311 (no secret)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples

    def __iter__(self) -> Iterator[int]:
        """Yield the order of one epoch."""
        order = list(range(self.samples))
        self.numbers.shuffle(order)
        return iter(order)
