"""A Task whose own learning-rate schedule is not in the checkpoint."""

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

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error."""
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD, and keep a schedule that the entrypoint does not see."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.own_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return optimizer

    def after_step(self, model: nn.Module) -> None:  # noqa: ARG002
        """Advance the schedule, which starts from its first step again in a resumed run."""
        self.own_schedule.step()
