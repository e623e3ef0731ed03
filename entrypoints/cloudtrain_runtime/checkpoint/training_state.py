"""The state that a checkpoint holds: model, optimizer, small objects, and every rank's random states."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from cloudtrain_runtime.checkpoint.safe_metadata import check_serializable, deserialize, serialize
from cloudtrain_runtime.contract.nearest_name import nearest
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

States = dict[str, Any]
"""As DCP takes it: `model`, `optimizer`, `objects` (bytes) and `rng` (bytes by rank)."""

_STATE = "optimizer.state."
_OBJECTS = "objects"
_RANDOM = "rng"
_MOST_NAMED = 3


def collect_states(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    objects: Mapping[str, Any],
    context: Context,
) -> States:
    """Return the states as they are now.

    Parameters and optimizer tensors are the live ones: copy them before the next optimizer step. Buffers, which change
    in a forward pass, are already copies. `objects` are plain values, equal on all ranks: state of schedule and scaler.
    """
    optimizers = list(optimizers)
    if optimizers:
        model_state, optimizer_state = get_state_dict(model, optimizers)
    else:
        model_state = get_model_state_dict(model)
        optimizer_state = {}
    return {
        "model": _settled(model_state, model),
        "optimizer": optimizer_state,
        "objects": serialize(dict(objects), _OBJECTS),
        "rng": {rank_key(context.rank): serialize(random_states(context), _RANDOM)},
    }


def collect_model_state(model: nn.Module) -> States:
    """Return the state of the model alone, as a target for loading."""
    return {"model": _settled(get_model_state_dict(model), model)}


def _settled(model_state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's state with copies of its buffers, and with the extra states of its modules as bytes."""
    parameters = _places(model)
    settled: dict[str, Any] = {}
    for name, value in model_state.items():
        if isinstance(value, DTensor | ShardedTensor):
            settled[name] = value
        elif isinstance(value, torch.Tensor):
            is_parameter = value.data_ptr() in parameters
            settled[name] = value if is_parameter else value.clone()
        else:
            # The extra state of a module, whose structure may differ when it is loaded.
            # Bytes are one entry of the checkpoint; DCP would split a mapping into many.
            settled[name] = serialize(value, f"model.{name}")
    return settled


@contextlib.contextmanager
def without_state_creation(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Prevent DCP from creating optimizer state in this block.

    DCP initializes an optimizer without state by a step with zero gradients, unless gradients exist. That step would
    count, and training would differ from a run without the save.
    """
    firsts = [next(_parameters(optimizer), None) for optimizer in optimizers if not optimizer.state]
    bare = [parameter for parameter in firsts if parameter is not None and parameter.grad is None]
    for parameter in bare:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in bare:
            parameter.grad = None


def clear_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Clear states and gradients, so that DCP allocates the state to be loaded."""
    for optimizer in optimizers:
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)


def check_saveable(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Reject a state that could be saved but not loaded, before the training begins.

    Raises:
        CheckpointError: an optimizer has parameters that are not the model's, or cannot be restored; or a state holds
            something other than plain values.
    """
    optimizers = list(optimizers)
    empty = sum(not group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    if empty > 1 or (empty and len(optimizers) > 1):
        raise CheckpointError(
            "PyTorch cannot load several optimizers or groups again where one has no parameters"
        )
    own = set(model.parameters())
    for module_name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            serialize(module.get_extra_state(), f"the extra state of {module_name or 'the model'}")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise CheckpointError(
                f"the state of {name} cannot be loaded again: give its checkpoints no optimizer"
            )
        strangers = sum(parameter not in own for parameter in _parameters(optimizer))
        if strangers:
            raise CheckpointError(
                f"{strangers} parameters of {name} are not the model's: give a module that holds both as `model`, such "
                "as nn.ModuleList([model, loss])"
            )
        for group in optimizer.param_groups:
            check_serializable(
                {f"{name}'s {key}": value for key, value in group.items() if key != "params"}
            )


def may_change_outside_steps(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Return whether parameters may change outside of a step of these optimizers: in the next forward pass.

    Examples are a target network that follows the trained one, and an embedding with `max_norm`.
    """
    stepped = {parameter for optimizer in optimizers for parameter in _parameters(optimizer)}
    for parameter in model.parameters():
        if parameter not in stepped or not parameter.requires_grad:
            return True
    return any(getattr(module, "max_norm", None) is not None for module in model.modules())


def unshared_names(states: States, model: nn.Module) -> frozenset[str]:
    """Return the names of model states that are not parameters, such as buffers: each rank may have its own."""
    parameters = _places(model)
    return frozenset(
        f"model.{name}"
        for name, value in states["model"].items()
        if not isinstance(value, DTensor)
        and not (isinstance(value, torch.Tensor) and value.data_ptr() in parameters)
    )


def restore_states(
    states: States,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    context: Context,
    names: Sequence[str],
) -> Any:
    """Set the model, the optimizers and this rank's random states to loaded ones; return the objects.

    Without states of this rank (it did not exist when the checkpoint was written) the random states stay as they are.
    `names` is the result of `parameter_names` for the states before loading.
    """
    optimizers = list(optimizers)
    _rename(states, optimizers, names)
    optimizer_state = states.get("optimizer", {})
    set_state_dict(
        model, optimizers, model_state_dict=_model_state(states), optim_state_dict=optimizer_state
    )
    own = states["rng"].get(rank_key(context.rank))
    if own:
        set_random_states(deserialize(own, _RANDOM), context)
    if not states["objects"]:
        return {}
    return deserialize(states["objects"], _OBJECTS)


def restore_model(states: States, model: nn.Module) -> None:
    """Set the model alone to loaded states."""
    set_model_state_dict(model, _model_state(states))


def _model_state(states: States) -> dict[str, Any]:
    found = dict(states["model"])
    for name, value in found.items():
        # The extra state of a module, which was saved as bytes.
        if isinstance(value, bytes):
            found[name] = deserialize(value, f"model.{name}")
    return found


def _rename(
    states: States, optimizers: Iterable[torch.optim.Optimizer], names: Sequence[str]
) -> None:
    """Assign this rank's parameters to the loaded groups: a pipeline's checkpoint lists those of one stage only."""
    if set(parameter_names(states)) == set(names):
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    left = iter(names)
    for loaded, own in zip(states["optimizer"].get("param_groups", ()), groups, strict=False):
        loaded["params"] = list(itertools.islice(left, len(own["params"])))


def parameter_names(states: States) -> list[str]:
    """Return the names of the optimizers' parameters in their order."""
    return [
        name for group in states["optimizer"].get("param_groups", ()) for name in group["params"]
    ]


def drop_unsaved_states(
    names: list[str], saved: Collection[str], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Remove optimizer state that the checkpoint did not hold: DCP creates it for parameters without gradients.

    `names` is the result of `parameter_names` before loading; `saved` has the parameters whose state was loaded.
    """
    owners = [
        (optimizer, parameter) for optimizer in optimizers for parameter in _parameters(optimizer)
    ]
    if len(owners) != len(names):
        return
    for name, (optimizer, parameter) in zip(names, owners, strict=True):
        if name not in saved:
            optimizer.state.pop(parameter, None)


def saved_optimizer(metadata: Metadata) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters with optimizer state in a checkpoint, and the names of the entries of such states."""
    found = [
        name.removeprefix(_STATE)
        for name in metadata.state_dict_metadata
        if name.startswith(_STATE)
    ]
    parts = [name.split(".") for name in found]
    # A state may be nested: its parameter's name is one of these prefixes.
    names = frozenset(".".join(part[:end]) for part in parts for end in range(1, len(part)))
    return names, frozenset(part[-1] for part in parts)


def optimizer_mismatch(kinds: Collection[str], optimizer_state: Mapping[str, Any]) -> str | None:
    """Return why states with these entries belong to another optimizer, or None."""
    states = optimizer_state.get("state", {}).values()
    # Almost every optimizer counts steps, so that entry distinguishes none.
    own = {str(kind) for state in states for kind in state} - {"step"}
    saved = set(kinds) - {"step"}
    if not own or not saved or own & saved:
        return None
    return f"its optimizer keeps {', '.join(sorted(saved))}, this one {', '.join(sorted(own))}"


def tensor_shapes(model_state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the global shapes of a model's tensors by name."""
    tensors = (torch.Tensor, ShardedTensor)
    return {
        name: list(value.size())
        for name, value in model_state.items()
        if isinstance(value, tensors)
    }


def saved_shapes(metadata: Metadata) -> dict[str, list[int]]:
    """Return the global shapes of the model's tensors in a checkpoint by name."""
    return {
        name.removeprefix("model."): list(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def shape_mismatch(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the shapes of saved tensors differ from a model's, by name; empty if they are equal."""
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own]
    shaped = [name for name in own if name in saved and saved[name] != own[name]]
    parts = (
        _describe(missing, lambda name: f"it has no {name}{_nearest(name, unexpected)}"),
        _describe(
            unexpected, lambda name: f"it has {name}, the model does not{_nearest(name, own)}"
        ),
        _describe(
            shaped,
            lambda name: f"its {name} has the shape {saved[name]}, the model's has {own[name]}",
        ),
    )
    return "; ".join(filter(None, parts))


def _describe(names: list[str], describe: Callable[[str], str]) -> str:
    parts = [describe(name) for name in names[:_MOST_NAMED]]
    if len(names) > _MOST_NAMED:
        parts.append(f"and {len(names) - _MOST_NAMED} more like this")
    return "; ".join(parts)


def _nearest(name: str, names: Collection[str]) -> str:
    near = nearest(name, names)
    return "" if near is None else f" (nearest: {near})"


def rank_key(rank: int) -> str:
    """Return the name of a rank's random states."""
    return f"rank-{rank:05d}"


def rng_sources(context: Context) -> list[str]:
    """Return the generators whose states are saved, for the manifest."""
    numpy = ["numpy"] if "numpy" in sys.modules else []
    cuda = ["cuda"] if context.device.type == "cuda" else []
    return ["torch", "python", *numpy, *cuda]


def _places(model: nn.Module) -> set[int]:
    return {
        parameter.data_ptr()
        for parameter in model.parameters()
        if not isinstance(parameter, DTensor)
    }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def random_states(context: Context) -> dict[str, Any]:
    """Return the states of this rank's random generators."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "cuda": None,
        "numpy": None,
    }
    if context.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(context.device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, [int(key) for key in keys], *rest]
    return states


def set_random_states(states: Mapping[str, Any], context: Context) -> None:
    """Set this rank's random generators to states from `random_states`."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if states["cuda"] is not None and context.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], context.device)
    if states["numpy"] is not None:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
