"""Forward and backward passes of ranks that have no samples left: they keep step with the others and change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


@contextlib.contextmanager
def suppress_gradients(model: nn.Module) -> Iterator[None]:
    """Give the forward and backward pass in this block gradients of exactly zero, and keep the buffers.

    A loss that is multiplied by 0 is not enough: where an activation is NaN or infinite, its gradient is NaN.

    Args:
        model: A plain model, its replica, or a sharded model.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    handles: list[Any] = []

    def watch(module: nn.Module, _: object = None) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        handles.extend(parameter.register_hook(torch.zeros_like) for parameter in trained)  # type: ignore[no-untyped-call]

    # A sharded unit has the parameters that get gradients only from the start of its forward pass, when it is gathered.
    units = [module for module in model.modules() if hasattr(type(module), "set_requires_gradient_sync")]
    if units:
        handles.extend([unit.register_forward_pre_hook(watch) for unit in units])
    else:
        watch(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def replace_nonfinite(batch: Any) -> Any:
    """Return a batch with zeros in place of numbers that are not finite.

    For a pipeline, which has the backward passes of several micro-batches under way at once.
    """
    return tree_map_only(torch.Tensor, _finite, batch)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0) if tensor.is_floating_point() else tensor
