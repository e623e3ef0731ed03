"""Pipeline parallelism: a model's layers in stages, on ranks one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.parallel.mesh import Mesh
from cloudtrain_runtime.task import Task


class Pipeline:
    """This rank's stages, and the schedule that brings micro-batches through all of them.

    Args:
        task: The user's.
        model: The whole model; what other stages hold is taken out of it.
        train: The job's train section.
        mesh: The grid of ranks.
        placed: Puts a stage on its ranks: sharded or replicated.
        scale: What a loss goes through before its backward pass.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        train: TrainConfig,
        mesh: Mesh,
        placed: Callable[[nn.Module], nn.Module],
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        del task, model, train, placed, scale
        raise JobError(f"train.parallel.pipeline: {mesh.pipeline} is not there yet")

    def run(self, batches: Iterable[Any], weights: Sequence[float]) -> torch.Tensor:
        """Bring micro-batches forward and backward.

        Args:
            batches: This rank's micro-batches, on its device; equal on all ranks of a pipeline.
            weights: What the loss of each is multiplied by.

        Returns:
            The weighted sum of the losses, a scalar; 0 but on the last stage.
        """
        raise NotImplementedError

    def evaluate(self, batch: Any, samples: int) -> Mapping[str, torch.Tensor]:
        """Return loss and metrics of a batch on the last stage, and nothing on the others."""
        raise NotImplementedError
