"""`Task`: the user's model, data and loss, trained by the shared entrypoint."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from cloudtrain_runtime.context import context

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

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:  # noqa: ARG002
        """Return a learning-rate schedule, advanced once per optimizer step, or None."""
        return None

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:  # noqa: ARG002
        """Return further metrics of an evaluation batch: by name, a tensor with one value per sample.

        They are averaged exactly over all samples of all ranks.
        """
        return {}

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of samples; by default torch's default_collate."""
        return default_collate(list(samples))


class TaskError(Exception):
    """The job's Task cannot be loaded or does not keep its promise."""


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
