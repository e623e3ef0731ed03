"""Fully sharded data parallelism (FSDP2), and the units of a model that it works in.

Parameters, gradients and the optimizer's state of a unit are spread over the ranks of `shard`; they come together for
the unit's forward and backward pass. With tensor parallelism each of these parts is itself one rank's part of a layer.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.parallel.mesh import Mesh

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: children of its lists and sequences that repeat a class and have parameters.

    The outermost such list counts: what lies in a block belongs to it.
    """
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = [type(child) for child in children]
    for child in children:
        if is_list and kinds.count(type(child)) > 1:
            yield child
        else:
            yield from _blocks(child)


def recompute_activations(units: Collection[nn.Module]) -> None:
    """Have the backward pass compute each unit's activations again instead of keeping them."""
    for unit in units:
        # On the instance, so that no name in the state_dict changes; hooks (FSDP's) stay outside.
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)


def shard(model: nn.Module, units: Collection[nn.Module], train: TrainConfig, mesh: Mesh) -> None:
    """Shard a model in place, unit by unit.

    Args:
        model: The whole model, or this rank's stage of it.
        units: Modules of it whose parameters come together at once; the rest of the model is one more.
        train: Precision, and whether parameters are freed between forward and backward pass.
        mesh: The grid of ranks.

    Raises:
        JobError: this torch has no FSDP2.
    """
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise JobError(f"data: fsdp needs PyTorch 2.6, and this is {torch.__version__}") from None
    # Told of each model that ends in a linear layer. Who does change its output in place is told by an error then.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    devices = mesh.device_mesh
    dtype = PRECISIONS.get(train.precision)
    options: dict[str, Any] = {
        # Copies of one rank each are plain replicas: what data: ddp means where layers are split, too.
        "mesh": devices["shard"] if mesh.replicate == 1 else devices["replicate", "shard"],
        "reshard_after_forward": train.parallel.reshard,
    }
    inside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=dtype and torch.float32)
    inner = set(model.modules()) - {model}
    for unit in units:
        if unit in inner:
            fully_shard(unit, **options, mp_policy=inside)
    fully_shard(model, **options, mp_policy=whole)
