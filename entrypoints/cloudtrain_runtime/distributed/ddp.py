"""Data parallelism with the whole model on every rank: DistributedDataParallel and its options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import TaskError

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
        fix_buckets(replica)
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
