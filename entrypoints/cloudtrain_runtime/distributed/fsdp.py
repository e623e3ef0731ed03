"""Fully sharded data parallelism (FSDP2), and the units of a model that it shards.

Parameters, gradients and optimizer state of a unit are sharded over the ranks of `shard`; its parameters are gathered
for the unit's forward and backward pass. With tensor parallelism each of them is already one rank's part of a layer.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context manager of a forward pass with this precision."""
    dtype = PRECISIONS.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def find_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: children of a ModuleList or Sequential that repeat a class and have parameters.

    The search ends at a block; nested blocks belong to it. It descends into a list of lists.
    """
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = [type(child) for child in children]
    for child in children:
        if (
            is_list
            and kinds.count(type(child)) > 1
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        ):
            yield child
        else:
            yield from find_units(child)


def recompute_activations(units: Collection[nn.Module]) -> None:
    """Recompute each unit's activations in the backward pass instead of keeping them (activation checkpointing)."""
    for unit in units:
        norms = [module for module in unit.modules() if isinstance(module, _BatchNorm)]
        options: dict[str, Any] = (
            {"context_fn": functools.partial(_contexts, norms)} if norms else {}
        )
        # Set on the instance, so that names in the state_dict stay; hooks such as those of FSDP still run outside.
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, **options)


def shard(model: nn.Module, units: Collection[nn.Module], train: TrainConfig, mesh: Mesh) -> None:
    """Shard a model, or this rank's pipeline stage, in place, unit by unit.

    The parameters of a unit are gathered together; the rest of the model is one more unit.

    Raises:
        JobError: a parameter cannot be sharded.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )  # since torch 2.6

    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise JobError(
            f"train.parallel: a parameter without a dimension cannot be sharded: {', '.join(scalars)}; give it one "
            "dimension, such as torch.ones(1)"
        )
    # torch warns about each model that ends in a linear layer. Code that changes its output in place gets an error.
    warnings.filterwarnings(
        "ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning
    )
    devices = mesh.device_mesh
    dtype = PRECISIONS.get(train.precision)
    options: dict[str, Any] = {
        # A shard size of 1 makes plain replicas, which is what `data: ddp` means with tensor parallelism.
        "mesh": devices["shard"] if mesh.replicate == 1 else devices["replicate", "shard"],
        "reshard_after_forward": train.parallel.reshard,
    }
    if train.parallel.offload:
        # Pinned memory is what copies to and from a GPU overlap with; without a GPU there is none.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.context.device.type == "cuda")
    # Gradients are reduced in fp32, or in the model's own precision if that is wider.
    is_double = dtype is None and any(
        parameter.dtype == torch.float64 for parameter in model.parameters()
    )
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float64 if is_double else torch.float32
    )
    for unit in [*_independent(units, model)]:
        fully_shard(unit, **options, mp_policy=policy)
    fully_shard(model, **options, mp_policy=replace(policy, output_dtype=dtype and torch.float32))


def _independent(units: Collection[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the units of a model that share no parameter with modules outside of them.

    Tied weights are gathered with the rest of the model, because units cannot share parameters.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f"{path}.")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for unit in units:
        inside = tuple(paths[unit])
        if unit is not model and all(
            name.startswith(inside) for own in unit.parameters() for name in names[own]
        ):
            yield unit


def _contexts(
    norms: Collection[_BatchNorm],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward pass and of its recomputation: only the first updates running statistics."""
    return contextlib.nullcontext(), _without_statistics(norms)


@contextlib.contextmanager
def _without_statistics(norms: Collection[_BatchNorm]) -> Iterator[None]:
    present = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # The buffers must stay in use: autograd checks that the recomputation saves as many tensors as the first pass.
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in present:
            norm.momentum, norm.num_batches_tracked = momentum, count
