"""Data parallelism with a full replica of the model on every rank: DistributedDataParallel and its options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.distributed.ddp_buckets import fix_buckets
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import TaskError

_NO_CONTEXT = contextlib.nullcontext()
_WITH_RECORDED_GRAPH: WeakSet[nn.Module] = WeakSet()
"""Replicas with a static graph whose first backward pass has begun."""


def replicate(
    model: nn.Module, config: ParallelConfig, mesh: Mesh, *, deterministic: bool = False
) -> nn.Module:
    """Return a replica of the model whose backward pass averages gradients over the data ranks."""
    if mesh.data_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    device = mesh.context.device
    options: dict[str, Any] = {
        "gradient_as_bucket_view": True,
        "static_graph": config.static_graph,
        "find_unused_parameters": config.find_unused,
    }
    if config.bucket_bytes is not None:
        options["bucket_cap_mb"] = config.bucket_bytes / 2**20
    replica = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=None if mesh.data_size == mesh.context.world_size else mesh.data_group,
        **options,
    )
    # On a GPU, buckets in the order in which gradients arrive are faster; DDP learns that order in the first step and
    # then sums in another order, so deterministic runs fix the buckets. With two ranks there is only one order of
    # summation. With a static graph the first step fixes the buckets, and with `find_unused` they never change.
    in_order = device.type == "cpu" or deterministic
    is_rebuilt = not (config.static_graph or config.find_unused)
    if in_order and mesh.data_size > 2 and is_rebuilt:  # noqa: PLR2004
        fix_buckets(replica)
    if config.compress == "bf16":
        # torch refuses this hook on other backends than NCCL by its name, so a lambda hides it; on Gloo it works, too.
        replica.register_comm_hook(
            mesh.data_group,
            lambda group, bucket: bf16_compress_hook(group, bucket),  # noqa: PLW0108
        )
    return replica


class GradientArrivals:
    """Records which parameters of a replica get a gradient in a backward pass.

    A parameter without a gradient on one rank makes all other ranks wait for it, without an end.

    Args:
        replica: The replica.
        names: Names of its parameters.
    """

    def __init__(self, replica: DistributedDataParallel, names: Mapping[nn.Parameter, str]) -> None:
        self._names = {each: name for each, name in names.items() if each.requires_grad}
        self._arrived: set[torch.Tensor] = set()
        # DDP itself knows what to do where one of its two options is set.
        self._is_needed = not (replica.static_graph or replica.find_unused_parameters)
        record = self._arrived.add
        self._handles = [
            each.register_post_accumulate_grad_hook(record)  # type: ignore[no-untyped-call]
            for each in (self._names if self._is_needed else ())
        ]

    def begin(self) -> None:
        """Forget the gradients of earlier backward passes."""
        self._arrived.clear()

    def require_all(self) -> None:
        """Raise a TaskError that names the parameters without a gradient since `begin`."""
        if not self._is_needed or len(self._arrived) == len(self._names):
            return
        missing = [name for each, name in self._names.items() if each not in self._arrived]
        raise TaskError(
            f"the loss of this step does not depend on {shorten(missing)}, and the other ranks would wait for their "
            "gradients: set train.parallel.find_unused: true, which looks for such parameters in each step; or, if "
            "no step uses them, remove them from the model, or set requires_grad_(False) on them in model()"
        )

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def shorten(names: Sequence[str], most: int = 4) -> str:
    """Return names in one text, with the number of those that are left out."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def synchronised(model: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Return a context in which a backward pass synchronises gradients (`now`) or only accumulates them."""
    if isinstance(model, DistributedDataParallel):
        # DDP records a static graph in the first backward pass, which must synchronise.
        is_first = model.static_graph and model not in _WITH_RECORDED_GRAPH
        _WITH_RECORDED_GRAPH.add(model)
        return _NO_CONTEXT if now or is_first else model.no_sync()
    # Sharded. Looked up on the class, because nn.Module is slow to find a missing attribute.
    if hasattr(type(model), "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(now)  # type: ignore[operator]
        return _explain_unused_units()
    return _NO_CONTEXT


@contextlib.contextmanager
def _explain_unused_units() -> Iterator[None]:
    try:
        yield
    except (
        AttributeError
    ) as error:  # raised by FSDP2 when gradients accumulate in a unit that was never gathered
        if "_unsharded_param" not in str(error):
            raise
        raise TaskError(
            "the model has a block that the loss does not depend on, and data: fsdp cannot accumulate without it: "
            "remove it from the model, or set train.accumulate to 1"
        ) from None
