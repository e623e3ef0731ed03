"""Fully sharded data parallelism (FSDP2), and the units of a model that it works in.

Parameters, gradients and the optimizer's state of a unit are spread over the ranks of `shard`; they come together for
the unit's forward and backward pass. With tensor parallelism each of these parts is itself one rank's part of a layer.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: children of its lists and sequences that repeat a class and have parameters.

    The outermost such list counts: what lies in a block belongs to it. A list of lists has its blocks in these.
    """
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = [type(child) for child in children]
    for child in children:
        if is_list and kinds.count(type(child)) > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _blocks(child)


def recompute_activations(units: Collection[nn.Module]) -> None:
    """Have the backward pass compute each unit's activations again instead of keeping them."""
    for unit in units:
        norms = [module for module in unit.modules() if isinstance(module, _BatchNorm)]
        again: dict[str, Any] = {"context_fn": functools.partial(_counted_once, norms)} if norms else {}
        # On the instance, so that no name in the state_dict changes; hooks (FSDP's) stay outside.
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, **again)


def shard(model: nn.Module, units: Collection[nn.Module], train: TrainConfig, mesh: Mesh) -> None:
    """Shard a model in place, unit by unit.

    Args:
        model: The whole model, or this rank's stage of it.
        units: Modules of it whose parameters come together at once; the rest of the model is one more.
        train: Precision, and whether parameters are freed between forward and backward pass.
        mesh: The grid of ranks.

    Raises:
        JobError: this torch has no FSDP2, or it cannot shard a parameter.
    """
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise JobError(f"data: fsdp needs PyTorch 2.6, and this is {torch.__version__}") from None
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise JobError(
            f"train.parallel: a parameter without a dimension cannot be sharded: {', '.join(scalars)}; give it one, "
            "such as torch.ones(1)"
        )
    # Told of each model that ends in a linear layer. Who does change its output in place is told by an error then.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    devices = mesh.device_mesh
    dtype = PRECISIONS.get(train.precision)
    options: dict[str, Any] = {
        # Copies of one rank each are plain replicas: what data: ddp means where layers are split, too.
        "mesh": devices["shard"] if mesh.replicate == 1 else devices["replicate", "shard"],
        "reshard_after_forward": train.parallel.reshard,
    }
    # Gradients are summed in fp32, or in the model's own precision where that is wider.
    is_double = dtype is None and any(parameter.dtype == torch.float64 for parameter in model.parameters())
    reduce_dtype = torch.float64 if is_double else torch.float32
    inside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    whole = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, output_dtype=dtype and torch.float32)
    for unit in [*_independent(units, model)]:
        fully_shard(unit, **options, mp_policy=inside)
    fully_shard(model, **options, mp_policy=whole)


def _independent(units: Collection[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the units below a model that share no parameter with what is outside of them.

    Tied weights come together with the rest of the model: units cannot share them.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f"{path}.")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for unit in units:
        inside = tuple(paths[unit])
        if unit is not model and all(name.startswith(inside) for own in unit.parameters() for name in names[own]):
            yield unit


def _counted_once(norms: Collection[_BatchNorm]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds a forward pass and its repetition: only the first counts in running statistics."""
    return contextlib.nullcontext(), _without_statistics(norms)


@contextlib.contextmanager
def _without_statistics(norms: Collection[_BatchNorm]) -> Iterator[None]:
    present = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # They take part: autograd has kept them in the first pass, and counts what it keeps.
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in present:
            norm.momentum, norm.num_batches_tracked = momentum, count
