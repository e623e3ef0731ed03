"""The Task of the recorded runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime import Task


class Small(Task):
    """Divide 64 points into two classes."""

    def __init__(
        self, width: int = 4, fail_at: int | None = None, step_seconds: float = 0.0
    ) -> None:
        self.width = width
        self.fail_at = fail_at
        self.step_seconds = step_seconds
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.Dropout(0.1), nn.Linear(self.width, 2))

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        return {"train": data, "validation": data}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ValueError("a sample is damaged")
        time.sleep(self.step_seconds)
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        inputs, targets = batch
        return {"loss": F.cross_entropy(model(inputs), targets)}
