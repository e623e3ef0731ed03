"""What a checkpoint holds besides its manifest: model, optimizer, what is small, and every rank's random states."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from cloudtrain_runtime.context import Context

States = dict[str, Any]
"""As DCP takes it: `model`, `optimizer`, `objects` (bytes) and `rng` (bytes by rank)."""


def states_of(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    objects: Mapping[str, Any],
    place: Context,
) -> States:
    """Return the states as they are now.

    Parameters and the optimizers' tensors are the live ones: copy them before the next step of an optimizer. Buffers,
    which change in a forward pass, are copies already.

    Args:
        model: Plain, replicated, sharded or compiled.
        optimizers: Its optimizers.
        objects: What torch.save can hold: state of schedule and scaler, equal on all ranks.
        place: This rank's place.
    """
    optimizers = list(optimizers)
    if optimizers:
        model_state, optimizer_state = get_state_dict(model, optimizers)
    else:
        model_state, optimizer_state = get_model_state_dict(model), {}
    parameters = {parameter.data_ptr() for parameter in model.parameters() if not isinstance(parameter, DTensor)}
    return {
        "model": {name: _settled(value, parameters) for name, value in model_state.items()},
        "optimizer": optimizer_state,
        "objects": _packed(dict(objects)),
        "rng": {rank_key(place.rank): _packed(random_states(place))},
    }


def put_back(states: States, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], place: Context) -> Any:
    """Set the model, the optimizers and this rank's random states to loaded ones; return the objects.

    Without states of this rank (it did not exist when the checkpoint was written) the random states stay as they are.
    """
    set_state_dict(
        model, list(optimizers), model_state_dict=states["model"], optim_state_dict=states.get("optimizer", {})
    )
    own = states["rng"].get(rank_key(place.rank))
    if own:
        _set_random(_unpacked(own), place)
    return _unpacked(states["objects"]) if states["objects"] else {}


def misfits(metadata: Metadata, model_state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the model a checkpoint lacks, has in another shape, or has too much."""
    saved = {
        name.removeprefix("model."): list(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: list(value.shape) for name, value in model_state.items() if isinstance(value, torch.Tensor)}
    for name, shape in own.items():
        if name not in saved:
            yield f"it has no {name}"
        elif saved[name] != shape:
            yield f"its {name} has the shape {saved[name]}, the model's has {shape}"
    yield from (f"it has {name}, the model has not" for name in saved if name not in own)


def rank_key(rank: int) -> str:
    """Return the name of a rank's random states."""
    return f"rank-{rank:05d}"


def rng_sources(place: Context) -> list[str]:
    """Return the generators whose states are saved, for the manifest."""
    numpy = ["numpy"] if "numpy" in sys.modules else []
    cuda = ["cuda"] if place.device.type == "cuda" else []
    return ["torch", "python", *numpy, *cuda]


def _settled(value: Any, parameters: set[int]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.data_ptr() in parameters:
        return value
    return value.clone()


def _packed(value: Any) -> bytes:
    # Bytes are one entry of the checkpoint; DCP would take a mapping apart into many.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    # A schedule's state may be any object, so this is a pickle, as DCP's own entries are: a checkpoint is to be trusted
    # like the code that it belongs to.
    return torch.load(io.BytesIO(data), weights_only=False)


# ---------------------------------------------------------------- random states


def random_states(place: Context) -> dict[str, Any]:
    """Return the states of this rank's random generators."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "cuda": torch.cuda.get_rng_state(place.device) if place.device.type == "cuda" else None,
        "numpy": None,
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, [int(key) for key in keys], *rest]
    return states


def _set_random(states: Mapping[str, Any], place: Context) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if states["cuda"] is not None and place.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], place.device)
    if states["numpy"] is not None:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
