"""Tasks whose ranks could come to train different models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cloudtrain_runtime import context
from support.parallel_training import VOCABULARY, WIDTH, Model, Small

FEW_TOKENS = VOCABULARY // 8
"""Texts that begin with one of these tokens use the model's branch."""


class Thawing(Small):
    """Trains its embedding from the second step on, and freezes its first block then."""

    def model(self) -> nn.Module:
        model = Model(0.0)
        model.embedding.requires_grad_(False)
        return model

    def after_step(self, model: nn.Module) -> None:
        if context().step == 1:
            model.embedding.requires_grad_(True)  # type: ignore[operator]
            model.blocks[0].requires_grad_(False)  # type: ignore[index,operator]


class ThawingInLoss(Thawing):
    """Unfreezes parameters while DDP waits for gradients."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        model.requires_grad_(True)
        return super().loss(model, batch)


class _Branched(Model):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.branch, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x_BT)
        chosen = x_BT[:, 0] < FEW_TOKENS
        if chosen.any():
            added = torch.zeros_like(hidden)
            added[chosen] = self.branch(hidden[chosen])
            hidden = hidden + added
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Branched(Small):
    """Has a branch that few samples use, and a layer that no sample uses."""

    def model(self) -> nn.Module:
        return _Branched()


class Planted(Small):
    """Changes one tensor of the last rank after the second step.

    Args:
        samples: Length of the data set.
        fault: A name in FAULTS.
    """

    def __init__(self, samples: int, *, fault: str) -> None:
        super().__init__(samples)
        self.fault = fault

    def model(self) -> nn.Module:
        model = Model(0.0)
        model.register_buffer("scale", torch.ones(3))
        model.extra = nn.BatchNorm1d(WIDTH)  # its statistics may differ, which is no fault
        model.extra.requires_grad_(False)
        return model

    def after_step(self, model: nn.Module) -> None:
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last and context().step == 2:
            FAULTS[self.fault](model)
        if is_last:
            model.extra.running_mean += 1.0  # type: ignore[operator,union-attr]


def _local(model: nn.Module, name: str) -> torch.Tensor:
    parameter = model.get_parameter(name).detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _flip(model: nn.Module) -> None:
    words = _local(model, "blocks.1.up.weight").view(torch.int32)
    words.flatten()[:1].bitwise_xor_(1)


def _step_own(model: nn.Module) -> None:
    weight = model.get_parameter("head.1.weight")
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.01).step()
    weight.grad = None


def _set_buffer(model: nn.Module) -> None:
    model.get_buffer("scale")[1] = 2.0


FAULTS: Mapping[str, Callable[[nn.Module], None]] = {
    "bit": _flip,
    "optimizer": _step_own,
    "buffer": _set_buffer,
}
