"""Buckets of DistributedDataParallel: the order in which it sums gradients over the ranks.

After the first backward pass of a process, DDP rebuilds its buckets in the order in which gradients arrived. With three
ranks or more, the position of a gradient in a bucket determines its order of summation. So the first step after a
resume would sum in another order than the same step of an uninterrupted run, and differ in the last bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def fix_buckets(replica: DistributedDataParallel) -> None:
    """Make DDP build its final buckets now, in the order of the model's parameters.

    All ranks call this together. It runs one backward pass of zeros; no weight changes.
    """
    if any(getattr(module, "sparse", False) for module in replica.modules()):
        return  # DDP keeps sparse gradients in separate buckets and does not accept dense ones for them
    average_gradients(replica)
    replica.zero_grad(set_to_none=True)


def fix_buckets_of_script(model: nn.Module) -> None:
    """Fix the buckets of a script's replicas on CPUs, so that a resumed run is bit-exact. All ranks call this together.

    A replica stays unchanged if it has gradients already, if it has two ranks (which have only one order of summation),
    or if its options keep DDP from rebuilding buckets.
    """
    for replica in [
        module for module in model.modules() if isinstance(module, DistributedDataParallel)
    ]:
        trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        rebuilds_buckets = not (replica.static_graph or replica.find_unused_parameters)
        is_new = all(parameter.grad is None for parameter in trained)
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in trained)
        if (
            rebuilds_buckets
            and is_new
            and is_on_cpu
            and dist.get_world_size(replica.process_group) > 2  # noqa: PLR2004
        ):
            fix_buckets(replica)


def average_gradients(replica: DistributedDataParallel) -> None:
    """Average accumulated gradients of backward passes without synchronisation over the data ranks."""
    module = replica.module
    replica.module = _SumOfParameters(module)
    try:
        with torch.enable_grad():
            total = replica()
            total.backward(torch.zeros_like(total))
    finally:
        replica.module = module


class _SumOfParameters(nn.Module):
    """Gives each parameter of a model a gradient, the last parameter first, as in the model's own backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                total = total + parameter.sum()
        return total
