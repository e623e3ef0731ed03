"""A Task's model, spread over the ranks as the job says: its steps in their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.distributed.ddp import replicate
from cloudtrain_runtime.distributed.fsdp import find_units, recompute_activations, shard
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.pipeline import Pipeline
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.metrics.flops import meta_copy
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.task import Task, checked_model

_OLDEST = (2, 6)
"""First torch with what shards and splits models here."""


@dataclass(frozen=True)
class DistributedModel:
    """A model on its ranks.

    Attributes:
        model: What is optimized, saved and exported: with a pipeline the whole model without the parameters of other
            stages, so that names stay.
        replica: What a training loss calls.
        pipeline: What runs the micro-batches instead, where the model's layers lie on several ranks.
        shape: The whole model without its numbers, as it was built: what its FLOPs are counted on. None on a CPU, whose
            utilisation nobody asks for.
    """

    model: nn.Module
    replica: nn.Module
    pipeline: Pipeline | None
    shape: nn.Module | None = None


def distribute_model(
    task: Task,
    train: TrainConfig,
    mesh: Mesh,
    scale: Callable[[torch.Tensor], torch.Tensor],
    dataset: Dataset[Any],
    stages: Sequence[int] | None = None,
) -> DistributedModel:
    """Build the Task's model and spread it.

    Args:
        task: The user's.
        train: The job's train section.
        mesh: The grid of ranks.
        scale: What a loss goes through before its backward pass.
        dataset: Training samples, to measure the stages of a pipeline with.
        stages: Links of each stage, as the run had them before.

    Raises:
        JobError: the Task or this torch lacks what the job asks for.
    """
    _check(task, mesh)
    if train.parallel.schedule == "zero_bubble":
        # Gradients of weights are computed past FSDP's hooks, which would gather them.
        train = replace(train, parallel=replace(train.parallel, reshard=False))
    model = checked_model(task)
    make_buffers_contiguous(model)
    shape = None if mesh.place.device.type == "cpu" else meta_copy(model)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and (mesh.is_plain or mesh.place.device.type == "cpu"):
        # A CPU has one stream of random numbers, the same on all ranks: drawn for a shard alone, all would be equal.
        initialize_weights(model, mesh.place.device)
        on_meta = False
    units: Collection[nn.Module] = ()
    if not mesh.is_plain or train.activation_checkpointing:
        told = None if mesh.is_plain else task.parallelize(model, mesh.device_mesh)
        units = list(dict.fromkeys(told or find_units(model)))  # a block may be used, and named, several times

    def placed(part: nn.Module) -> nn.Module:
        return _placed(part, units, train, mesh, on_meta=on_meta)

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
    """Let no two elements of a buffer lie in one place, as expand() leaves them: nobody could write them."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride() and not buffer.is_contiguous():
                setattr(module, name, buffer.contiguous())


def gather_weights(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Return the unsharded state_dict on the CPU, on rank 0; all ranks take part, the others get an empty one.

    One tensor at a time is whole on a device, and one stage of a pipeline in the host memory of its first rank.
    """
    holds = mesh.data_rank == mesh.tensor_rank == 0
    state: dict[str, Any] = {}
    with _without_advice():
        for name, value in model.state_dict().items() if mesh.is_plain else get_model_state_dict(model).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if holds:
                state[name] = _on_cpu(whole)
    return _of_all_stages(state, mesh) if mesh.pipeline > 1 else state


def _of_all_stages(state: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Send what ranks hold to rank 0, tensor by tensor; return all of it there, elsewhere an empty dictionary."""
    forms = {name: value.to("meta") if _is_sent(value) else value for name, value in state.items()}
    group = dist.new_group(backend="gloo")  # for tensors on the CPU
    found: dict[str, Any] = {}
    for rank, own in enumerate(gather(forms, mesh.place)):
        for name, form in own.items():
            if not mesh.place.is_main:
                if rank == mesh.place.rank and _is_sent(form):
                    dist.send(state[name].contiguous(), dst=0, group=group)
            elif rank == 0 or not _is_sent(form):
                found[name] = state[name] if rank == 0 else form
            else:
                found[name] = torch.empty(form.shape, dtype=form.dtype)
                dist.recv(found[name], src=rank, group=group)
    gather(None, mesh.place)  # nobody leaves before all of it has come
    return found


def _is_sent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep torch from telling that what is sharded twice is gathered in two steps: nobody can change it."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def is_told(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("While redistributing from")

    logger.addFilter(is_told)
    try:
        yield
    finally:
        logger.removeFilter(is_told)


def _placed(
    part: nn.Module, units: Collection[nn.Module], train: TrainConfig, mesh: Mesh, *, on_meta: bool
) -> nn.Module:
    """Return what a forward pass of a model, or of a stage, goes through."""
    modules = set(part.modules())
    inner = [unit for unit in units if unit in modules]
    device = mesh.place.device
    if train.activation_checkpointing:
        recompute_activations(inner or [part])
    if mesh.is_sharded:
        for unit in (inner or [part]) if train.compile else ():
            unit.compile()
        shard(part, inner, train, mesh)
    if on_meta:
        initialize_weights(part, device)
    part.to(device)
    if mesh.is_sharded:
        return part
    # Compiled inside of the replica: no_sync must stay DDP's.
    compiled: Any = torch.compile(part) if train.compile else part
    return replicate(compiled, train.parallel, mesh, deterministic=train.deterministic)


def _check(task: Task, mesh: Mesh) -> None:
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if not mesh.is_plain and version < _OLDEST:
        raise JobError(f"train.parallel: this torch is {torch.__version__}, and only ddp works before 2.6")
    for name, method in (("tensor", "parallelize"), ("pipeline", "pipeline")):
        if mesh.sizes[name] > 1 and getattr(type(task), method) is getattr(Task, method):
            raise JobError(
                f"train.parallel.{name}: {mesh.sizes[name]} needs a method {method}() of {type(task).__name__}, which "
                "tells how its layers are split"
            )


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
