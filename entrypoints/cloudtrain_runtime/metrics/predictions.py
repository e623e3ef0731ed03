"""What a Task's `predict` returns: classes, probabilities or numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import Batch, Task, shape_of, with_location


@dataclass(frozen=True)
class Prediction:
    """Predictions for a batch, and the truth."""

    predicted: torch.Tensor  # class of each sample, [B]; or numbers, [B] or [B, ...]
    true: torch.Tensor  # of the same shape
    confidence: torch.Tensor | None = (
        None  # probability of the predicted class, [B]; None without probabilities
    )

    @property
    def is_class(self) -> bool:
        """Whether it holds classes, not numbers."""
        return not self.true.is_floating_point()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Prediction:
        """Return a prediction with a function applied to each tensor."""
        confidence = None if self.confidence is None else function(self.confidence)
        return Prediction(function(self.predicted), function(self.true), confidence)


@with_location("predict")
def checked_prediction(task: Task, model: nn.Module, batch: Batch, samples: int) -> Prediction:
    """Return the Task's predictions for a batch.

    Raises:
        TaskError: the result is neither two tensors with one integer per sample, nor probabilities and integers, nor
            numbers of equal shapes.
    """
    result: Any = task.predict(model, batch)
    parts = result if isinstance(result, tuple) and len(result) == 2 else ()  # noqa: PLR2004
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and not part.is_complex()]
    if len(tensors) == len(parts) > 0:
        predicted, true = tensors
        shapes = list(predicted.shape), list(true.shape)
        floats = predicted.is_floating_point(), true.is_floating_point()
        if floats == (False, False) and shapes == ([samples], [samples]):
            return Prediction(predicted, true)
        if floats == (True, False) and shapes[1] == [samples] and shapes[0][:-1] == [samples]:
            confidence, classes = predicted.float().max(dim=1)
            return Prediction(classes, true, confidence)
        if floats == (True, True) and shapes[0] == shapes[1] and shapes[0][:1] == [samples]:
            return Prediction(predicted, true)
    raise TaskError(
        "predict() must return the predicted and the true class of each sample: two tensors of integers "
        f"of the shape [{samples}], or probabilities [{samples}, classes] and integers, or numbers of equal shapes; "
        f"it returned {shape_of(result)}"
    )
