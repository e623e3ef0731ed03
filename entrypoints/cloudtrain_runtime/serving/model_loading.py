"""The model of a Task with the weights of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from cloudtrain_runtime.checkpoint.safe_metadata import load_state_dict
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.task import checked_model
from cloudtrain_runtime.training.task_loading import load_task


def load_model(task: str, arguments: Mapping[str, Any], weights: Path) -> nn.Module:
    """Return the model of a Task in evaluation mode, on the CPU. Its code must be importable.

    Args:
        task: `module:Class`.
        arguments: Arguments of the Task.
        weights: File with a state_dict.

    Raises:
        JobError: the Task cannot be created, or the weights do not fit its model.
    """
    model = checked_model(load_task(task, arguments))
    load_weights(model, weights)
    return model.eval()


def load_weights(model: nn.Module, weights: Path) -> None:
    """Load a model's weights from a file with a state_dict. A model without memory, on the meta device, gets theirs.

    Raises:
        JobError: the file has no weights, or they do not fit the model.
    """
    saved = load_state_dict(weights, weights.name)
    tensors = (*model.parameters(), *model.buffers())
    try:
        model.load_state_dict(saved, assign=any(each.is_meta for each in tensors))
    except (RuntimeError, TypeError) as error:
        raise JobError(f"the weights do not fit its model: {error}") from None
