"""The memory that one rank of a job needs, measured by one process on a CPU, without the other ranks.

    python -m cloudtrain_runtime.training.memory_probe --root /opt/ml --world-size 16

Parameters, gradients and optimizer state are exact: the model is distributed over as many ranks as the job has, in a
process group without communication, and rank 0's shards are counted. Activations are those that autograd keeps for the
backward pass, measured at two batch sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from cloudtrain_runtime.contract import ML_ROOT_VARIABLE, TrainConfig
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.data import is_iterable
from cloudtrain_runtime.distributed.fsdp import autocast, find_units, recompute_activations
from cloudtrain_runtime.distributed.gradients import local_tensor
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import distribute_model, initialize_weights
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.launcher.sagemaker_environment import sagemaker_variables
from cloudtrain_runtime.metrics.flops import meta_copy
from cloudtrain_runtime.process.environment import ml_tree, read_run_config
from cloudtrain_runtime.process.run_context import Context, context
from cloudtrain_runtime.process.seeds import seed_everything
from cloudtrain_runtime.task import (
    Task,
    checked_datasets,
    checked_model,
    checked_optimizers,
    collate_function,
    overrides,
)
from cloudtrain_runtime.training.task_loading import load_task

PROBED_BATCHES = (2, 4)
"""Samples per batch of the two measurements. Batch norm rejects a batch of one sample."""


@dataclass(frozen=True)
class StateBytes:
    """The bytes that rank 0 holds throughout the training.

    Attributes:
        parameters: Its parameters or shards, and its buffers.
        gradients: Gradients of the parameters that are trained.
        optimizer: State of the optimizers after a step.
        gathered: Sharded parameters that are gathered at the same time, at most, with one unit's gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps for the backward pass of a micro-batch of so many samples."""

    samples: int
    bytes: int


def main(arguments: list[str]) -> None:
    """Measure the Task of a run.json, and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--root", required=True, help="folder with the layout of /opt/ml: run.json and channels"
    )
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job")
    options = parser.parse_args(arguments)
    os.environ.update({ML_ROOT_VARIABLE: options.root, "CUDA_VISIBLE_DEVICES": ""})
    config = read_run_config(os.environ)
    if (
        config is None
        or config.task is None
        or config.train is None
        or not isinstance(config.args, dict)
    ):
        sys.exit("run.json has no Task")
    os.environ.update(
        sagemaker_variables(ml_tree(os.environ), gpus=0, user_args=[], entry_point=config.task)
    )
    sys.path.insert(0, str(Path.cwd()))
    # What the Task prints is not part of the answer.
    output = sys.stdout
    sys.stdout = sys.stderr
    try:
        task = load_task(config.task, config.args)
        activations = measure_activations(task, config.train)
        state = measure_state(task, config.train, context(), options.world_size)
    except JobError as error:
        sys.exit(f"error: {error}")
    answer = {
        "state": dataclasses.asdict(state),
        "activations": [dataclasses.asdict(each) for each in activations],
    }
    # At once: the exit that skips the shutdown flushes sys.stdout, which is another stream now.
    print(dump_json(answer), file=output, flush=True)


def measure_state(task: Task, train: TrainConfig, place: Context, world_size: int) -> StateBytes:
    """Return the bytes of rank 0 of a group of `world_size` ranks.

    Raises:
        JobError: the ranks cannot be arranged as `train.parallel` asks, or the Task has a mistake.
    """
    seed_everything(train.seed)
    if train.parallel.is_plain:
        return _replica_bytes(task)
    with _group_without_communication(world_size):
        mesh = Mesh.of(train.parallel, replace(place, rank=0, world_size=world_size))
        # Compilation changes no size, and offload needs a GPU.
        plain = replace(train, compile=False, parallel=replace(train.parallel, offload=False))
        dataset = checked_datasets(task)["train"]
        model = distribute_model(task, plain, mesh, lambda loss: loss, dataset).model
        return replace(_state_bytes(task, model), gathered=_gathered_bytes(model, train, mesh))


def measure_activations(task: Task, train: TrainConfig) -> list[Activations]:
    """Return the bytes of the activations at each batch size in `PROBED_BATCHES` that the dataset has samples for.

    The model is not sharded: tensor parallelism makes some of its activations smaller.
    """
    seed_everything(train.seed)
    model = checked_model(task)
    if any(parameter.is_meta for parameter in model.parameters()):
        initialize_weights(model, torch.device("cpu"))
    if train.activation_checkpointing:
        recompute_activations(list(find_units(model)) or [model])
    model.train()
    samples = _first_samples(checked_datasets(task)["train"], max(PROBED_BATCHES))
    collate = collate_function(task)
    found = []
    for count in PROBED_BATCHES:
        if count > len(samples):
            continue
        counter = _Counter(model)
        with (
            autocast(train.precision, torch.device("cpu")),
            torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda kept: kept.tensor),
        ):
            batch = collate(samples[:count])
            counter.hold(batch)
            _forward_backward(task, model, batch)
        found.append(Activations(count, counter.peak_bytes))
        model.zero_grad(set_to_none=True)
    return found


def _first_samples(dataset: Dataset[Any], count: int) -> list[Any]:
    samples: Any = dataset
    if is_iterable(dataset):
        return list(itertools.islice(samples, count))
    return [samples[index] for index in range(min(count, len(samples)))]


def _forward_backward(task: Task, model: nn.Module, batch: Any) -> None:
    if overrides(task, "training_step"):
        task.training_step(model, batch, _backward)
        return
    loss = task.loss(model, batch)
    torch.autograd.backward(loss[0] if isinstance(loss, tuple) else loss)


def _backward(name: str, loss: torch.Tensor) -> None:  # noqa: ARG001 (the Task may name its arguments)
    torch.autograd.backward(loss)


class _Counter:
    """Counts the bytes of the storages that are kept for a backward pass, each once, without the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {_storage_of(each)[0] for each in (*model.parameters(), *model.buffers())}
        self._users = Counter[int]()
        self._bytes = self.peak_bytes = 0

    def hold(self, batch: Any) -> None:
        """Count the tensors of a batch, which is kept until the end of the step."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self._keep(*_storage_of(leaf))

    def pack(self, tensor: torch.Tensor) -> _Kept:
        """Count a tensor that autograd saves, until autograd frees it."""
        pointer, size = _storage_of(tensor)
        kept = _Kept(tensor)
        if pointer not in self._own:
            self._keep(pointer, size)
            weakref.finalize(kept, self._free, pointer, size)
        return kept

    def _keep(self, pointer: int, size: int) -> None:
        self._users[pointer] += 1
        if self._users[pointer] == 1:
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _free(self, pointer: int, size: int) -> None:
        self._users[pointer] -= 1
        if self._users[pointer] == 0:
            self._bytes -= size


@dataclass(eq=False)
class _Kept:
    """A tensor that autograd saves."""

    tensor: torch.Tensor


def _storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a number that identifies a tensor's storage, and its bytes."""
    # A sparse tensor has no storage of its own.
    if tensor.layout != torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _replica_bytes(task: Task) -> StateBytes:
    """Return the bytes of a full replica. Its gradients are DDP's buckets, so they need no second copy."""
    model = checked_model(task)
    try:
        # On the meta device it takes no memory.
        return _state_bytes(task, meta_copy(model))
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        # Some optimizers read values.
        return _state_bytes(task, model)


def _state_bytes(task: Task, model: nn.Module) -> StateBytes:
    """Return the bytes of a model on its rank; its optimizers take one step with gradients of zeros."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gradients = _bytes_of(parameter.grad for parameter in parameters)
    optimizers = checked_optimizers(task, model).values()
    for optimizer in optimizers:
        optimizer.step()
    held = _bytes_of([*parameters, *model.buffers()])
    states = [list(each.state.values()) for each in optimizers]
    return StateBytes(held, gradients, _bytes_of(tree_leaves(states)))


def _bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of this rank's parts of the tensors among some values."""
    found = (local_tensor(each) for each in values if isinstance(each, torch.Tensor))
    return sum(each.numel() * each.element_size() for each in found)


def _gathered_bytes(model: nn.Module, train: TrainConfig, mesh: Mesh) -> int:
    """Return the bytes of the parameters that FSDP gathers at the same time, and of one unit's gradients.

    While a unit computes, the next one is gathered. The outermost unit stays gathered from its forward to its backward
    pass, and with `reshard: false` all units do.
    """
    if not mesh.is_sharded or mesh.shard == 1:
        return 0
    from torch.distributed.fsdp import FSDPModule

    size = {"fp32": 4}.get(train.precision, 2)
    owned: set[int] = set()
    units: list[int] = []
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # The innermost first: a parameter belongs to the nearest unit.
    for unit in reversed(sharded):
        own = [each for each in unit.parameters() if id(each) not in owned]
        owned.update(map(id, own))
        units.append(sum(each.numel() for each in own) // mesh.tensor)
    root = units[-1]
    inner = sorted(units[:-1], reverse=True)
    gathered = sum(units)
    if train.parallel.reshard:
        gathered = root + sum(inner[:2])
    return size * gathered + 4 * max(units)


@contextlib.contextmanager
def _group_without_communication(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose collectives do nothing. See decision 032."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
