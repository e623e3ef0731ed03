"""A Task that prints the bytes that its rank holds after each step. Forked ranks must be able to import it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support.parallel_training import Small


class Measured(Small):
    """Predict the next token, and print this rank's bytes."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, and keep it."""
        self.built = super().optimizer(model)
        return self.built

    def after_step(self, model: nn.Module) -> None:
        """Print the bytes of parameters and buffers, and of the state of the optimizer."""
        state = [value for each in self.built.state.values() for value in each.values()]
        found = {
            "parameters": _bytes([*model.parameters(), *model.buffers()]),
            "optimizer": _bytes(state),
        }
        print("BYTES", json.dumps(found), flush=True)


def _bytes(tensors: list[Any]) -> int:
    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in own)
