"""Passes of ranks without samples: they take part in collectives and contribute nothing to the gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


@contextlib.contextmanager
def suppress_gradients(model: nn.Module) -> Iterator[None]:
    """Make all gradients of a forward and backward pass in this context exactly zero, and restore the buffers.

    A loss multiplied by 0 is not enough: the gradient of an infinite or NaN activation is NaN.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    handles: list[Any] = []

    def add_hooks(module: nn.Module, _: object = None) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        handles.extend(parameter.register_hook(torch.zeros_like) for parameter in trained)  # type: ignore[no-untyped-call]

    # The parameters of a sharded unit that get gradients exist only after it is gathered for a forward pass.
    units = [
        module for module in model.modules() if hasattr(type(module), "set_requires_gradient_sync")
    ]
    if units:
        handles.extend([unit.register_forward_pre_hook(add_hooks) for unit in units])
    else:
        add_hooks(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def replace_nonfinite(batch: Any) -> Any:
    """Return a batch with zeros in place of NaN and infinite numbers.

    A pipeline needs this, because it runs backward passes of several micro-batches at once.
    """

    def finite(tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
            if tensor.is_floating_point()
            else tensor
        )

    return tree_map_only(torch.Tensor, finite, batch)
