"""Tasks with wrong or unusual chains, in a module that ranks can import."""

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
    """From [B, T, D] to [T, B, D], and how many there are beside it."""

    def forward(self, x_btd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x_btd.transpose(0, 1), torch.full((x_btd.shape[0],), x_btd.shape[0])


class Flat(nn.Module):
    """From [T, B, D] to [B * T, D]: neither first dimension is samples."""

    def forward(self, x_tbd: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert counts.tolist() == [x_tbd.shape[1]] * x_tbd.shape[1]  # nothing is padding
        return x_tbd.transpose(0, 1).reshape(-1, WIDTH)


class Whole(nn.Module):
    """Back to [B, T, D]."""

    def forward(self, x_nd: torch.Tensor) -> torch.Tensor:
        return x_nd.unflatten(0, (-1, LENGTH))


class Twisted(Small):
    """Passes on tensors of all kinds of shapes, integers among them."""

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        embedding, *blocks, head = super().pipeline(model, stages)
        first = nn.Sequential(embedding, SequenceFirst())
        second, third = Flat(), nn.Sequential(Whole(), blocks[0])
        return [first, second, third, *blocks[1:], head]


class Named(Small):
    """Prints what the stage of this rank is called, as its optimizer sees it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        print("HOLDS", *(name for name, _ in model.named_parameters()), flush=True)
        return super().optimizer(model)


class Tied(Small):
    """Shares the embedding with the head."""

    def model(self) -> nn.Module:
        model = super().model()
        model.head[1].weight = model.embedding.tokens.weight  # type: ignore[index,union-attr,assignment]
        return model


class Growing(Small):
    """Has texts of several lengths."""

    def collate(self, samples: Sequence[Any]) -> torch.Tensor:
        texts = torch.stack(list(samples))
        return texts if texts[0, 0] < 8 else texts[:, :5]


class Grouped(Small):
    """Decays some parameters only, and has a schedule that continues from the present learning rates."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups: list[Mapping[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=self.learning_rate)  # type: ignore[arg-type]

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        cut_evenly()
        return super().pipeline(model, stages)


class Twice(Small):
    """Calls the model twice."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + F.cross_entropy(model(batch[:, 1:]).flatten(0, 1), batch[:, 1:].flatten())


class Biased(Small):
    """Another model than that of the checkpoint, in its last stage only."""

    def model(self) -> nn.Module:
        model = super().model()
        model.head[1].bias_too = nn.Parameter(torch.zeros(1))  # type: ignore[index,union-attr]
        return model
