"""Buckets of DistributedDataParallel: the order in which it sums gradients over the ranks.

DDP lays out its buckets anew after the first backward pass of a process, in the order in which gradients arrived. With
three ranks or more, the place of a gradient in a bucket decides in which order it is summed. So the first step after a
resume would be summed in another order than the same step of an uninterrupted run, and differ in the last bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def fix_buckets(replica: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets now, for good, by the order in which the model names its parameters.

    All ranks call it together. It runs one backward pass of zeros; no weight changes.
    """
    if any(getattr(module, "sparse", False) for module in replica.modules()):
        return  # DDP keeps sparse gradients in buckets of their own, and takes no others for them
    average_gradients(replica)
    replica.zero_grad(set_to_none=True)


def fix_buckets_of_script(model: nn.Module) -> None:
    """Fix the buckets of a script's replicas where that makes resumed runs repeat the same bits: on CPUs.

    A replica is left alone if it has gradients already, if two ranks share it (their sum has only one order), or if its
    options keep DDP from laying out buckets anew.

    Args:
        model: A replica, or a module that contains some. All ranks call this together.
    """
    for replica in [module for module in model.modules() if isinstance(module, DistributedDataParallel)]:
        trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        is_laid_out_anew = not (replica.static_graph or replica.find_unused_parameters)
        is_new = all(parameter.grad is None for parameter in trained)
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in trained)
        if is_laid_out_anew and is_new and is_on_cpu and dist.get_world_size(replica.process_group) > 2:  # noqa: PLR2004
            fix_buckets(replica)


def average_gradients(replica: DistributedDataParallel) -> None:
    """Average over the data ranks what backward passes without synchronisation have added up."""
    module = replica.module
    replica.module = _EveryParameter(module)
    try:
        with torch.enable_grad():
            total = replica()
            total.backward(torch.zeros_like(total))
    finally:
        replica.module = module


class _EveryParameter(nn.Module):
    """Has a gradient for each parameter of a model; the last one comes first, as in a model's own backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                total = total + parameter.sum()
        return total
