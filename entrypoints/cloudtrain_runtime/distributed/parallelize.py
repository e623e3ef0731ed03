"""Distribution of a Task's model over the ranks, as the job's `train.parallel` asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.contract.task_methods import training_step_conflicts
from cloudtrain_runtime.distributed.ddp import replicate
from cloudtrain_runtime.distributed.fsdp import find_units, recompute_activations, shard
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.pipeline import Pipeline
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.metrics.flops import meta_copy
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.task import Task, checked_model, overrides

_OLDEST = (2, 6)
"""Oldest torch version that supports FSDP2, tensor and pipeline parallelism."""


@dataclass(frozen=True)
class DistributedModel:
    """A model on its ranks."""

    # the model that is optimized, saved and exported; with a pipeline the full model without the parameters of other
    # stages, so that names stay the same
    model: nn.Module
    replica: nn.Module  # the module that a training loss calls
    # runs the micro-batches instead of `replica`, where pipeline ranks share the model's layers
    pipeline: Pipeline | None
    # the full model on the meta device, for counting FLOPs. None on a CPU, where utilisation is not reported.
    shape: nn.Module | None = None


def distribute_model(
    task: Task,
    train: TrainConfig,
    mesh: Mesh,
    scale: Callable[[torch.Tensor], torch.Tensor],
    dataset: Dataset[Any],
    stages: Sequence[int] | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
) -> DistributedModel:
    """Build the Task's model and distribute it over the ranks.

    Args:
        task: The user's Task.
        train: The job's train section.
        mesh: The grid of ranks.
        scale: Scales a loss before its backward pass.
        dataset: Training dataset, for measuring the layers of a pipeline.
        stages: Number of links in each pipeline stage of the resumed run, if any.
        initialize: Sets the weights of the full model on each rank, before it is distributed.

    Raises:
        JobError: the Task or the installed torch does not support what the job asks for.
    """
    _check(task, train, mesh)
    if train.parallel.schedule == "zero_bubble":
        # This schedule computes gradients of weights without FSDP's hooks, which would gather the weights again.
        train = replace(train, parallel=replace(train.parallel, reshard=False))
    model = checked_model(task)
    make_buffers_contiguous(model)
    shape = None if mesh.context.device.type == "cpu" else meta_copy(model)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and (mesh.is_plain or mesh.context.device.type == "cpu"):
        # All ranks have the same random state on the CPU: shards drawn one by one would all be equal.
        initialize_weights(model, mesh.context.device)
        on_meta = False
    if initialize is not None:
        initialize(model)
    units: Collection[nn.Module] = ()
    if not mesh.is_plain or train.activation_checkpointing:
        named_units = None if mesh.is_plain else task.parallelize(model, mesh.device_mesh)
        units = list(
            dict.fromkeys(named_units or find_units(model))
        )  # a block may occur several times
    is_called_whole = not overrides(
        task, "training_step"
    )  # DDP needs this; a training step calls submodules
    placed = partial(
        _placed,
        units=units,
        train=train,
        mesh=mesh,
        on_meta=on_meta,
        is_synchronised=is_called_whole,
    )
    if mesh.pipeline > 1:
        pipeline = Pipeline(task, model, train, mesh, placed, scale, dataset, stages)
        return DistributedModel(model, model, pipeline, shape)
    return DistributedModel(model, placed(model), None, shape)


def initialize_weights(model: nn.Module, device: torch.device) -> None:
    """Give memory and initial weights to a model that was built on the meta device."""
    model.to_empty(device=device)
    own: Any = getattr(model, "init_weights", None)
    if callable(own):
        own()
        return
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise JobError(
                f"the model was built on the meta device, and {type(module).__name__} has neither init_weights() nor "
                "reset_parameters() to draw its weights with"
            )


def make_buffers_contiguous(model: nn.Module) -> None:
    """Make buffers contiguous in which elements share memory, as after expand(): these cannot be written."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride() and not buffer.is_contiguous():
                setattr(module, name, buffer.contiguous())


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers to a device, and leave its parameters where they are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def gather_weights(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Gather the full state_dict on the CPU of rank 0. All ranks call this; the others get an empty dictionary.

    A device holds one unsharded tensor at a time; the first rank of a pipeline stage holds that stage in host memory.
    """
    is_sender = mesh.data_rank == mesh.tensor_rank == 0
    state: dict[str, Any] = {}
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(
        logging.ERROR
    )  # it advises against gathering in two steps, which users cannot change
    try:
        for name, value in (
            model.state_dict().items() if mesh.is_plain else get_model_state_dict(model).items()
        ):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if is_sender:
                state[name] = full.detach().cpu() if isinstance(full, torch.Tensor) else full
    finally:
        logger.setLevel(level)
    return _gather_stages(state, mesh) if mesh.pipeline > 1 else state


def _gather_stages(state: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Send the tensors of all ranks to rank 0 one by one; return them there, and an empty dictionary elsewhere."""
    forms = {name: value.to("meta") if _is_sent(value) else value for name, value in state.items()}
    group = dist.new_group(backend="gloo")  # for tensors on the CPU
    found: dict[str, Any] = {}
    for rank, own in enumerate(gather(forms, mesh.context)):
        for name, form in own.items():
            if not mesh.context.is_main:
                if rank == mesh.context.rank and _is_sent(form):
                    dist.send(state[name].contiguous(), dst=0, group=group)
            elif rank == 0 or not _is_sent(form):
                found[name] = state[name] if rank == 0 else form
            else:
                found[name] = torch.empty(form.shape, dtype=form.dtype)
                dist.recv(found[name], src=rank, group=group)
    gather(None, mesh.context)  # no rank continues before rank 0 has received all tensors
    return found


def _is_sent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _placed(
    part: nn.Module,
    units: Collection[nn.Module],
    train: TrainConfig,
    mesh: Mesh,
    *,
    on_meta: bool,
    is_synchronised: bool,
) -> nn.Module:
    """Place a model or a stage on its ranks: compiled, sharded or replicated. Return the module to call."""
    modules = set(part.modules())
    inner = [unit for unit in units if unit in modules]
    # With offload FSDP keeps the parameters on the CPU; buffers are used on the device.
    device = torch.device("cpu") if train.parallel.offload else mesh.context.device
    if train.activation_checkpointing:
        recompute_activations(inner or [part])
    if mesh.is_sharded:
        for unit in (inner or [part]) if train.compile else ():
            unit.compile()
        shard(part, inner, train, mesh)
    if on_meta:
        initialize_weights(part, device)
    part.to(device)
    if train.parallel.offload:
        move_buffers(part, mesh.context.device)
    if mesh.is_sharded or not is_synchronised:
        return part
    # The replica wraps the compiled module, so that DDP's no_sync stays available.
    compiled: Any = torch.compile(part) if train.compile else part
    return replicate(compiled, train.parallel, mesh, deterministic=train.deterministic)


def _check(task: Task, train: TrainConfig, mesh: Mesh) -> None:
    conflicts = training_step_conflicts(train) if overrides(task, "training_step") else []
    if conflicts:
        raise JobError(
            f"train.{'.'.join(conflicts[0])}: does not work with training_step(): remove one of them"
        )
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if not mesh.is_plain and version < _OLDEST:
        raise JobError(
            f"train.parallel: torch {torch.__version__} supports data: ddp only; use torch 2.6 or newer"
        )
    if not mesh.is_plain and mesh.context.device.type == "cuda" and mesh.context.backend == "gloo":
        # Gloo has no all-gather and no point-to-point messages for tensors of a GPU: torch ends with a segmentation
        # fault. Sources: the table of backends in torch.distributed's documentation, 2.13; pytorch/pytorch#132471.
        raise JobError(
            "train.parallel: ranks that share a GPU use Gloo, which supports data: ddp only; "
            "use one rank per GPU (cluster.processes_per_instance), or hide the GPUs (CUDA_VISIBLE_DEVICES= )"
        )
    if mesh.pipeline > 1 and overrides(task, "after_step"):
        raise JobError(
            "train.parallel.pipeline: after_step() does not work with a pipeline, where each rank has only some of the "
            "weights: use data: fsdp, or remove after_step()"
        )
    for name, method in (("tensor", "parallelize"), ("pipeline", "pipeline")):
        if mesh.sizes[name] > 1 and not overrides(task, method):
            raise JobError(
                f"train.parallel.{name}: {mesh.sizes[name]} needs a method {method}() of {type(task).__name__} "
                "that splits its layers"
            )
