"""Tasks with wrong or unusual pipeline chains, in a module that ranks can import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.parallel_training import (
    LENGTH,
    WIDTH,
    Small,
    cut_evenly,
)


class SequenceFirst(nn.Module):
    """Transpose [B, T, D] to [T, B, D], and return the number of samples B as a second tensor."""

    def forward(self, x_btd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x_btd.transpose(0, 1), torch.full((x_btd.shape[0],), x_btd.shape[0])


class Flat(nn.Module):
    """Flatten [T, B, D] to [B * T, D]. In neither tensor the first dimension is the number of samples."""

    def forward(self, x_tbd: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert counts.tolist() == [x_tbd.shape[1]] * x_tbd.shape[1]  # there is no padding
        return x_tbd.transpose(0, 1).reshape(-1, WIDTH)


class Unflatten(nn.Module):
    """Reshape [B * T, D] to [B, T, D]."""

    def forward(self, x_nd: torch.Tensor) -> torch.Tensor:
        return x_nd.unflatten(0, (-1, LENGTH))


class Twisted(Small):
    """Passes tensors of several shapes and types between stages."""

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        embedding, *blocks, head = super().pipeline(model, stages)
        first = nn.Sequential(embedding, SequenceFirst())
        second, third = Flat(), nn.Sequential(Unflatten(), blocks[0])
        return [first, second, third, *blocks[1:], head]


class Named(Small):
    """Prints the names of the parameters of this rank's stage."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        print("HOLDS", *(name for name, _ in model.named_parameters()), flush=True)
        return super().optimizer(model)


class Tied(Small):
    """Shares the weights of the embedding with the head."""

    def model(self) -> nn.Module:
        model = super().model()
        model.head[1].weight = model.embedding.tokens.weight  # type: ignore[index,union-attr,assignment]
        return model


class Growing(Small):
    """Has texts of two lengths."""

    def collate(self, samples: Sequence[Any]) -> torch.Tensor:
        texts = torch.stack(list(samples))
        return texts if texts[0, 0] < 8 else texts[:, :5]


class Grouped(Small):
    """Has two parameter groups, and a schedule that derives each learning rate from the previous one."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups: list[Mapping[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "lr": 0.02},
        ]
        return torch.optim.AdamW(groups, lr=self.learning_rate)  # type: ignore[arg-type]

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        cut_evenly()
        return super().pipeline(model, stages)


class Twice(Small):
    """Calls the model twice in the loss."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + F.cross_entropy(
            model(batch[:, 1:]).flatten(0, 1), batch[:, 1:].flatten()
        )


class Biased(Small):
    """Has one more parameter than the checkpoint, in the last stage."""

    def model(self) -> nn.Module:
        model = super().model()
        model.head[1].bias_too = nn.Parameter(torch.zeros(1))  # type: ignore[index,union-attr]
        return model
