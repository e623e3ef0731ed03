"""`Task`: the user's model, data and loss, trained by the shared entrypoint."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, default_collate

from cloudtrain_runtime.context import context
from cloudtrain_runtime.errors import TaskError

Batch = Any
"""What `collate` returns: tensors, or tuples, lists and mappings of them. First dimension: samples."""


class Task(ABC):
    """A model, its data and its loss. Subclasses take `code.args` as keyword arguments.

    Every method runs once in every rank's process, with the same seed in all of them.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with its initial weights, on the CPU. The entrypoint moves and replicates it."""

    @abstractmethod
    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return map-style datasets by split: `train`, and optionally `validation` and `test`.

        Every rank must see the same samples in the same order.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the batch's samples, a scalar.

        Args:
            model: Call this one (it synchronises gradients), not a model kept in `self`.
            batch: What `collate` returned, on this rank's device.
        """

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer; by default AdamW with the job's `train.learning_rate`."""
        train = context().train
        return torch.optim.AdamW(model.parameters(), lr=train.learning_rate if train else 1e-3)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Module] | None:  # noqa: ARG002
        """Split layers over `mesh["tensor"]`, and return the modules that `data: fsdp` gathers and frees one by one.

        Called where `train.parallel` asks for more than replicas, before the model is sharded and compiled.

        Args:
            model: The whole model, to be changed in place, such as by
                `torch.distributed.tensor.parallel.parallelize_module(block, mesh["tensor"], plan)`.
            mesh: The ranks by `pipeline`, `replicate`, `shard` and `tensor`; each is there, if need be with size 1.

        Returns:
            The units, usually the blocks; None lets the entrypoint take the children of lists that repeat a class.
        """
        return None

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the model as a chain of modules, each called with what the one before has returned.

        The first is called with what `loss` calls the model with, what the last returns is what `loss` gets. There may
        be more than `stages`: they are shared out so that each rank takes equally long.

        Args:
            model: The whole model; the chain is made of its modules, so that parameters keep their names.
            stages: How many parts there will be.
        """
        raise TaskError(f"train.parallel.pipeline: {type(self).__name__} has no method pipeline() for {stages} stages")

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:  # noqa: ARG002
        """Return a learning-rate schedule, advanced once per optimizer step; None takes the job's `train.schedule`."""
        return None

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:  # noqa: ARG002
        """Return further metrics of an evaluation batch: by name, a tensor with one value per sample.

        They are averaged exactly over all samples of all ranks.
        """
        return {}

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of samples; by default torch's default_collate."""
        return default_collate(list(samples))


SPLITS = ("train", "validation", "test")


def checked_datasets(task: Task) -> dict[str, Dataset[Any]]:
    """Return the Task's datasets.

    Raises:
        TaskError: they are not datasets by split, or one has no length or no samples.
    """
    datasets: Any = task.datasets()
    if not isinstance(datasets, Mapping):
        kind = type(datasets).__name__
        raise TaskError(f'datasets() must return a mapping such as {{"train": dataset}}; it returned a {kind}')
    unknown = [str(split) for split in datasets if split not in SPLITS]
    if unknown or "train" not in datasets:
        found = ", ".join(map(str, datasets)) or "none"
        raise TaskError(f"datasets() must have train, and may have validation and test; it has {found}")
    for split, dataset in datasets.items():
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            kind = type(dataset).__name__
            raise TaskError(f"the {split} dataset needs __len__ and __getitem__ (map-style); {kind} has not both")
        if len(dataset) == 0:
            raise TaskError(f"the {split} dataset is empty")
    return dict(datasets)


def checked_loss(task: Task, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the Task's loss of a batch.

    Raises:
        TaskError: it is not a scalar tensor.
    """
    loss: Any = task.loss(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{type(loss).__name__}"
        raise TaskError(f"loss() must return a scalar tensor, the mean over the batch's samples; it returned {got}")
    return loss


def checked_metrics(task: Task, model: nn.Module, batch: Batch, samples: int) -> Mapping[str, torch.Tensor]:
    """Return the Task's metrics of an evaluation batch.

    Raises:
        TaskError: a metric has not one value per sample, or is called `loss`.
    """
    metrics: Mapping[str, Any] = task.metrics(model, batch)
    for name, values in metrics.items():
        if name == "loss":
            raise TaskError("metrics() must not have a metric called loss: that is the Task's own")
        if not isinstance(values, torch.Tensor) or list(values.shape) != [samples]:
            got = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise TaskError(
                f"metrics() must return one value per sample: {name} of a batch of {samples} has the shape {got}, "
                f"expected [{samples}] (no mean: the entrypoint averages over all samples of all ranks)"
            )
    return metrics


def load_task(reference: str, arguments: Mapping[str, Any]) -> Task:
    """Import and create the Task named `module:Class`.

    Raises:
        TaskError: there is no such class, it is no Task, or it does not take these arguments.
    """
    module_name, _, class_name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise TaskError(f"code.task: there is no module {module_name} in the code folder") from None
    found: Callable[..., Any] | None = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        tasks = [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)]
        known = ", ".join(name for name in tasks if name != "Task") or "none"
        raise TaskError(f"code.task: {class_name} in {module.__file__} is not a Task (Tasks there: {known})")
    try:
        return found(**arguments)
    except TypeError as error:
        raise TaskError(f"code.args: {class_name} cannot be created: {error}") from error
