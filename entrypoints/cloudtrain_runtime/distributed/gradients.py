"""Gradients of a distributed model: their global norm, clipping, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from cloudtrain_runtime.distributed.mesh import Mesh


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, mesh: Mesh) -> torch.Tensor:
    """Clip gradients to a global norm of at most `most`; return the norm before clipping.

    The host does not wait for the device. With `most` infinite the gradients stay unchanged.
    """
    parameters = list(parameters)
    if mesh.is_plain and most != math.inf:
        return nn.utils.clip_grad_norm_(parameters, most)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients, mesh)
    if gradients and most != math.inf:
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(
            [local_tensor(gradient) for gradient in gradients], factor.to(gradients[0].device)
        )
    return norm


@torch.no_grad()
def global_norm(gradients: Iterable[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Return the 2-norm of the gradients of the full model: a scalar on this rank's device, equal on all ranks.

    Each rank adds up the squares of its shards; the sums are reduced over the ranks that hold the other shards, so each
    gradient counts once, however many ranks have a copy.
    """
    device = mesh.context.device
    if mesh.is_plain:
        return _norm(list(gradients), device)
    total = torch.zeros((), device=device)
    # This rank's shards by the process groups that hold the other shards.
    shards: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in map(_reduced, gradients):
        shards.setdefault(tuple(_groups(gradient)), []).append(local_tensor(gradient))
    for groups, parts in shards.items():
        squares = (
            _norm(parts, device).square().to(device)
        )  # those of offloaded gradients are on the CPU
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    if mesh.pipeline > 1:
        dist.all_reduce(total, group=mesh.group("pipeline"))
    return total.sqrt()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DistributedGradScaler:
    """A loss scale that is the same on all ranks, though each rank has only its shard of the gradients.

    An overflow on any rank makes every rank skip the step. The rule and the state are those of `torch.amp.GradScaler`,
    which looks at the gradients of its own rank only. For each optimizer in turn: `unscale_`, `step`, `update`.
    """

    _GROWTH_FACTOR, _BACKOFF_FACTOR, _GROWTH_INTERVAL = 2.0, 0.5, 2000  # the defaults of torch

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scale = 2.0**16
        self._steps = 0  # in a row without an overflow
        self._has_overflow = False

    def is_enabled(self) -> bool:
        """Return True, for use in place of torch's scaler."""
        return True

    def get_scale(self) -> float:
        """Return the loss scale."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss in fp32: in fp16 it would overflow."""
        return loss.float() * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, and find out whether one on any rank is not finite."""
        gradients = [
            local_tensor(parameter.grad)
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
        ]
        overflow = torch.zeros((), device=self._device)
        if gradients:
            is_finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
            overflow.copy_(is_finite.logical_not())  # offloaded gradients are on the CPU
            torch._foreach_mul_(gradients, 1.0 / self._scale)
        dist.all_reduce(overflow)
        self._has_overflow = bool(overflow)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step unless a gradient is not finite."""
        if not self._has_overflow:
            optimizer.step()

    def update(self) -> None:
        """Lower the scale after an overflow; raise it after many steps without one."""
        self._steps += 1
        if self._has_overflow:
            self._steps = 0
            self._scale *= self._BACKOFF_FACTOR
        elif self._steps == self._GROWTH_INTERVAL:
            self._steps = 0
            if self._scale * self._GROWTH_FACTOR <= torch.finfo(torch.float32).max:
                self._scale *= self._GROWTH_FACTOR

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the form of `torch.amp.GradScaler`: a run may resume in a layout that uses that."""
        return {
            "scale": self._scale,
            "growth_factor": self._GROWTH_FACTOR,
            "backoff_factor": self._BACKOFF_FACTOR,
            "growth_interval": self._GROWTH_INTERVAL,
            "_growth_tracker": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a scaler of this class or of torch's."""
        self._scale, self._steps = float(state["scale"]), int(state["_growth_tracker"])


LossScaler = torch.amp.GradScaler | DistributedGradScaler


def make_scaler(device: torch.device, mesh: Mesh, *, enabled: bool) -> LossScaler:
    """Return the loss scale; one that does nothing unless `enabled`."""
    if mesh.is_plain or not enabled:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    return DistributedGradScaler(device)


def disable_foreach_across_meshes(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update its parameters one by one if they are on different device meshes.

    A foreach or fused operation accepts tensors of one mesh only.
    """
    grids = {
        parameter.device_mesh if isinstance(parameter, DTensor) else None
        for parameter in _parameters(optimizer)
    }
    if len(grids) > 1:
        for group in optimizer.param_groups:
            group["foreach"] = False
            if group.get("fused"):
                group["fused"] = False


def _norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    values = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    norms = [torch.linalg.vector_norm(value.float()) for value in values]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _reduced(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient without partial placements: a sum of squares of partial values would be wrong."""
    if not isinstance(gradient, DTensor):
        return gradient
    complete = [
        Replicate() if placement.is_partial() else placement for placement in gradient.placements
    ]
    return (
        gradient
        if complete == list(gradient.placements)
        else gradient.redistribute(placements=complete)
    )


def _groups(gradient: torch.Tensor) -> Iterator[dist.ProcessGroup]:
    if isinstance(gradient, DTensor):
        grid = gradient.device_mesh
        for dimension, placement in enumerate(gradient.placements):
            if not placement.is_replicate() and grid.size(dimension) > 1:
                yield grid.get_group(dimension)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
