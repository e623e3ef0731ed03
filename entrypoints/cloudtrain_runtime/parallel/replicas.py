"""Data parallelism with the whole model on every rank: DistributedDataParallel and its options."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.parallel.mesh import Mesh


def replicate(model: nn.Module, config: ParallelConfig, mesh: Mesh) -> nn.Module:
    """Return the model whose backward pass averages gradients over the data ranks."""
    if mesh.data_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    device = mesh.place.device
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": config.static_graph}
    if config.bucket_bytes is not None:
        options["bucket_cap_mb"] = config.bucket_bytes / 2**20
    replica = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=None if mesh.data_size == mesh.place.world_size else mesh.data_group,
        **options,
    )
    # On a GPU the order of arrival is worth more: there DDP finds it out, and the first step sums in another order. The
    # sum of two ranks has only one. A static graph is laid out once and for all by its first step.
    if device.type == "cpu" and mesh.data_size > 2 and not config.static_graph:  # noqa: PLR2004
        _fix_buckets(replica)
    if config.compress == "bf16":
        replica.register_comm_hook(mesh.data_group, _send_as_bf16)
    return replica


def synchronised(model: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Return a block whose backward pass synchronises gradients now, or only adds them up."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if now else model.no_sync()
    if hasattr(type(model), "set_requires_gradient_sync"):  # sharded; a module looks long for what it has not
        model.set_requires_gradient_sync(now)  # type: ignore[operator]
    return contextlib.nullcontext()


def _send_as_bf16(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in bf16.

    torch's own hook divides in bf16 before it sends, and needs NCCL 2.10; this one runs on Gloo as well.
    """
    whole: torch.Tensor = bucket.buffer()
    size = dist.get_world_size(group)
    small = whole.to(torch.bfloat16)
    work: Any = dist.all_reduce(small, group=group, async_op=True)

    def restored(_: torch.futures.Future[Any]) -> torch.Tensor:
        return whole.copy_(small).div_(size)

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(restored)
    return averaged


def _fix_buckets(replica: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets now, for good, by the order in which the model names its parameters.

    By itself it does so after the first backward pass of a process. So the first step after a resume would be summed
    over ranks in another order than the same step of a run that was not interrupted, and differ in the last bits.
    """
    if any(getattr(module, "sparse", False) for module in replica.modules()):
        return  # DDP keeps sparse gradients in buckets of their own, and takes no others for them
    module = replica.module
    replica.module = _EveryParameter(module)
    try:
        total = replica()
        total.backward(torch.zeros_like(total))
    finally:
        replica.module = module
    replica.zero_grad(set_to_none=True)


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
