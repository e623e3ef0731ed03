"""A Task whose checkpoint takes longer than the time after a stop notice."""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime import Task

SECONDS = 10.0


class Slow(nn.Linear):
    """A layer that is slow to save, as one is that collects its state from a service."""

    def get_extra_state(self) -> torch.Tensor:
        """Return a number, after more seconds than the test grants after a stop notice."""
        time.sleep(SECONDS)
        return torch.zeros(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Ignore the number."""


class Faulty(Task):
    """A linear regression with 24 samples."""

    def model(self) -> nn.Module:
        """Map inputs [N, 3] to numbers [N, 1]."""
        return Slow(3, 1)

    def datasets(self) -> dict[str, Dataset]:
        """Return the sum of three random numbers."""
        inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error."""
        return F.mse_loss(model(batch[0]), batch[1])
