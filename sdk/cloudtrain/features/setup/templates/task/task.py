"""A Task: a small network learns the sine from generated points. cloudtrain trains it on all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime import Batch, Task


class Sine(Task):
    """Fit y = sin(x).

    Args:
        width: Number of hidden units.
    """

    def __init__(self, width: int = 32) -> None:
        self.width = width

    def model(self) -> nn.Module:
        """Map [N, 1] to [N, 1]."""
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return the splits. Only `train` is required; the others are evaluated."""
        x = torch.linspace(-3, 3, 1000).unsqueeze(1)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts = {"train": order[:800], "validation": order[800:]}
        return {split: TensorDataset(x[index], x[index].sin()) for split, index in parts.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean squared error."""
        x, y = batch
        return F.mse_loss(model(x), y)
