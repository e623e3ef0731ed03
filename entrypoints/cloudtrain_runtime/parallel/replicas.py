"""Data parallelism with the whole model on every rank: DistributedDataParallel and its options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.parallel.mesh import Mesh

_NOTHING = contextlib.nullcontext()


def replicate(model: nn.Module, config: ParallelConfig, mesh: Mesh, *, deterministic: bool = False) -> nn.Module:
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
    # On a GPU the order of arrival is worth more, but in deterministic runs: there DDP finds it out, and the first step
    # sums in another order. The sum of two ranks has only one. A static graph is laid out for good by its first step.
    in_order = device.type == "cpu" or deterministic
    if in_order and mesh.data_size > 2 and not config.static_graph:  # noqa: PLR2004
        _fix_buckets(replica)
    if config.compress == "bf16":
        # torch refuses this hook without NCCL, by its name; on Gloo it does the same.
        replica.register_comm_hook(mesh.data_group, lambda group, bucket: bf16_compress_hook(group, bucket))  # noqa: PLW0108
    return replica


def synchronised(model: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Return a block whose backward pass synchronises gradients now, or only adds them up."""
    if isinstance(model, DistributedDataParallel):
        # A static graph is found out in the first backward pass, which must synchronise for it.
        knows_graph = not model.static_graph or model._static_graph_delay_allreduce_enqueued  # noqa: SLF001
        return _NOTHING if now or not knows_graph else model.no_sync()
    if hasattr(type(model), "set_requires_gradient_sync"):  # sharded; a module looks long for what it has not
        model.set_requires_gradient_sync(now)  # type: ignore[operator]
        return _told_of_idle_units()
    return _NOTHING


def average_gradients(replica: DistributedDataParallel) -> None:
    """Average over the data ranks what backward passes without synchronisation have added up."""
    module = replica.module
    replica.module = _EveryParameter(module)
    try:
        total = replica()
        total.backward(torch.zeros_like(total))
    finally:
        replica.module = module


@contextlib.contextmanager
def _told_of_idle_units() -> Iterator[None]:
    try:
        yield
    except AttributeError as error:  # FSDP2's, where gradients are added up and a unit has never been gathered
        if "_unsharded_param" not in str(error):
            raise
        raise TaskError(
            "the model has a block that the loss does not depend on, and data: fsdp cannot accumulate without it: "
            "remove it from the model, or set train.accumulate to 1"
        ) from None


def _fix_buckets(replica: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets now, for good, by the order in which the model names its parameters.

    By itself it does so after the first backward pass of a process. So the first step after a resume would be summed
    over ranks in another order than the same step of a run that was not interrupted, and differ in the last bits.
    """
    if any(getattr(module, "sparse", False) for module in replica.modules()):
        return  # DDP keeps sparse gradients in buckets of their own, and takes no others for them
    average_gradients(replica)
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
