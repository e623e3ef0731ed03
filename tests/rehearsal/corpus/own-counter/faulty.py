"""A Task with a counter that is not in the checkpoint."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

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

    calls = 0

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error, with a weight that grows with the calls of this process."""
        self.calls += 1
        return F.mse_loss(model(batch[0]), batch[1]) * min(1.0, self.calls / 20)
