"""A Task with two optimizers, whose rates fall where a metric does not rise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from support.gans import Gan


class Falling(Gan):
    """Its metric falls on rank 0 and rises on the others."""

    evaluations = 0
    rates: list[Mapping[str, Any]]

    def optimizer(self, model: Any) -> Any:
        found = {
            "discriminator": torch.optim.SGD(model.discriminator.parameters(), lr=0.02),
            "generator": torch.optim.SGD(model.generator.parameters(), lr=0.01),
        }
        self.rates = [each.param_groups[0] for each in found.values()]
        return found

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)

    def after_evaluation(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        rank = int(os.environ["RANK"])
        self.evaluations += 1
        print(
            f"rank {rank} in evaluation {self.evaluations}:",
            ",".join(str(group["lr"]) for group in self.rates),
        )
        assert metrics.keys() == {"loss", "score"}
        assert split == "validation"
        return {"rising": float(self.evaluations if rank else -self.evaluations)}
