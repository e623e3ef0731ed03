"""Unusual models. Tests train them with each kind of parallelism, see parallel_training.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.parallel_training import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Embedding,
    Model,
    Small,
    cut_evenly,
)


class Odd(Small):
    """Trains an unusual model.

    Args:
        samples: Length of the training split.
        kind: Name of the model in KINDS.
        validates: Length of the validation split.
    """

    def __init__(self, samples: int, *, kind: str, validates: int = 3) -> None:
        super().__init__(samples, validates=validates)
        self.kind = kind

    def model(self) -> nn.Module:
        return KINDS[self.kind]()

    def parallelize(self, model: nn.Module, mesh: Any) -> None:  # type: ignore[override]
        """Split no module, and return no FSDP units, so that the runtime chooses them."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


class Normed(nn.Module):
    """Batch norm, whose statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = Embedding(), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(x_BT).transpose(1, 2)).transpose(1, 2)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Buffered(Model):
    """Buffers of several kinds: complex, transposed, expanded, boolean, None, and not in the state_dict."""

    def __init__(self) -> None:
        super().__init__(0.0)
        angles = torch.arange(LENGTH)[:, None] * torch.arange(WIDTH // 2)[None, :] / 100.0
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
        )
        self.register_buffer("is_kept", torch.ones(WIDTH, dtype=torch.bool))
        self.register_buffer("across", torch.ones(WIDTH, LENGTH).t())
        self.register_buffer("alike", torch.ones(1, 1).expand(LENGTH, WIDTH))
        self.register_buffer("none", None)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x_BT)
        turned = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)).contiguous()) * self.turns
        hidden = torch.view_as_real(turned).flatten(-2) * self.is_kept * self.across * self.alike
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Rooted(Model):
    """A root module with parameters of its own."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(()))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden = (self.embedding(x_BT) + self.shift) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Named(nn.Module):
    """A ModuleDict of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"in": Embedding(), "one": nn.Linear(WIDTH, WIDTH), "two": nn.Linear(WIDTH, WIDTH)}
        )
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.layers["in"](x_BT)
        for name in ("one", "two"):
            hidden = F.relu(self.layers[name](hidden))
        scores: torch.Tensor = self.out(hidden)
        return scores


class Single(nn.Module):
    """One parameter and no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY) / 10)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        return self.table[x_BT]


def _tied() -> nn.Module:
    model = Model(0.0)
    model.head[1].weight = model.embedding.tokens.weight
    return model


def _tied_blocks() -> nn.Module:
    """Return a model in which two blocks share a layer."""
    model = Model(0.0)
    model.blocks[2].up = model.blocks[0].up
    return model


def _same_block() -> nn.Module:
    """Return a model that calls the same block three times."""
    model = Model(0.0)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    return model


def _frozen() -> nn.Module:
    model = Model(0.0)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)
    return model


def _unused() -> nn.Module:
    model = Model(0.0)
    model.spare = nn.Linear(3, 3)
    return model


def _unused_block() -> nn.Module:
    """Return a model with a list of layers that it never calls."""
    model = Model(0.0)
    model.spare = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    return model


def _listed() -> nn.Module:
    """Return a model whose blocks are lists of layers. The lists are not called, only their layers."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3)
            )
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(x_BT)
            for norm, layer in self.layers:
                hidden = hidden + F.relu(layer(norm(hidden)))
            scores: torch.Tensor = self.head(hidden)
            return scores

    return Listed()


KINDS: Mapping[str, Callable[[], nn.Module]] = {
    "buffers": Buffered,
    "root": Rooted,
    "mapping": Named,
    "single": Single,
    "tied": _tied,
    "tied blocks": _tied_blocks,
    "same block": _same_block,
    "frozen": _frozen,
    "lists": _listed,
    "normed": Normed,
    "unused": _unused,
    "unused block": _unused_block,
}


class Killed(Small):
    """Kills the last rank with SIGKILL in the forward pass of a micro-batch."""

    def __init__(self, samples: int, *, killed_at: int = 0, **others: Any) -> None:
        super().__init__(samples, **others)
        self.killed_at, self.calls = killed_at, 0

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        cut_evenly()
        return super().pipeline(model, stages)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            self.calls += 1
            if self.calls == self.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
