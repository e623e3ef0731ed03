"""Weights of micro-batches in the loss of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from cloudtrain_runtime.distributed.gradients import local_tensor
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import BatchLoss


class LossWeights:
    """The weights of one rank's micro-batches in one step.

    Gradients are averaged over the data ranks. A mean loss gets the weight with which each sample of the global batch
    counts the same, however unevenly ranks and micro-steps share them. The number of what a summed loss counts is
    unknown before the last micro-step: until then it is weighted as if each sample had one of them, and `settle`
    corrects the gradients.

    Args:
        counts: Samples in each micro-batch; 0 for a placeholder.
        samples: Samples of the global batch.
        data_size: Number of data ranks.
    """

    def __init__(self, counts: Sequence[int], samples: int, data_size: int) -> None:
        self.counts = counts
        self._samples, self._factor = samples, data_size / samples
        self._counted: torch.Tensor | None = None
        self._has_mean = False

    @property
    def is_summed(self) -> bool:
        """Whether this rank had a loss with a count."""
        return self._counted is not None

    def weigh(self, loss: BatchLoss, micro_step: int) -> torch.Tensor:
        """Return the loss of a micro-batch times its weight, and record its count."""
        samples = self.counts[micro_step]
        self._has_mean |= loss.count is None
        if loss.count is not None:
            own = loss.count if samples else torch.zeros_like(loss.count)
            self._counted = own if self._counted is None else self._counted + own
        if self._has_mean and self._counted is not None:
            raise TaskError(
                "loss() must always return a mean, or always a pair of a sum and its count; it did both"
            )
        weight = self._factor * (samples if loss.count is None else bool(samples))
        return (
            loss.value if weight == 1.0 else loss.value * weight
        )  # a factor of 1 would only cost time

    def settle(
        self, total: torch.Tensor, parameters: Iterable[nn.Parameter], mesh: Mesh
    ) -> torch.Tensor:
        """Divide gradients of summed losses by their global count; return this rank's share of the mean loss.

        Args:
            total: This rank's sum of weighted losses.
            parameters: Those with the gradients of the step, after all ranks have averaged them.
            mesh: The grid of ranks, all of which call this together.
        """
        counted = self._counted
        if counted is None:  # an earlier stage of a pipeline
            counted = torch.zeros((), dtype=torch.float64, device=mesh.context.device)
        everywhere = mesh.mean(counted) * mesh.data_size
        factor = self._samples / torch.where(everywhere > 0, everywhere, 1.0)
        gradients = [
            local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return total * factor.to(total.dtype)
