"""Proxies for a pipelined model in a Task's loss() and metrics().

On every rank, a first proxy captures the inputs that loss() calls the model with; on the last stage, a second one
returns the pipeline's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import Batch, Task

ModelInputs = tuple[torch.Tensor, ...]
"""Positional inputs of a model call."""


def capture_model_inputs(task: Task, batch: Batch, *, training: bool) -> ModelInputs:
    """Return the inputs that the Task's loss() calls the model with.

    Raises:
        TaskError: loss() does not call the model, or not with positional tensors.
    """
    try:
        task.loss(_InputCapture().train(training), batch)
    except _Called as called:
        return called.call
    raise TaskError("train.parallel.pipeline: loss() does not call the model")


class _Called(BaseException):
    """Ends loss() at its call of the model. Not an Exception, which loss() might catch."""

    def __init__(self, call: ModelInputs) -> None:
        super().__init__()
        self.call = call


class _ModelProxy(nn.Module):
    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"with train.parallel.pipeline a loss can only call the model: there is no model.{name}"
        )


class _InputCapture(_ModelProxy):
    def forward(self, *args: Any, **named: Any) -> NoReturn:
        raise _Called(_checked(args, named))


class OutputProxy(_ModelProxy):
    """Returns a given output: for one call of loss(), or for calls of another method with the same inputs.

    Args:
        output: What the pipeline returned.
        expected: The inputs with which loss() called the model; None for loss() itself.
        method: The Task's method that gets the proxy.

    Raises:
        TaskError: on a call, loss() calls the model twice, or the other method with other inputs.
    """

    def __init__(
        self, output: Any, expected: ModelInputs | None = None, method: str = "loss"
    ) -> None:
        super().__init__()
        self.output, self.expected, self.method, self.calls = output, expected, method, 0

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the output."""
        call = _checked(args, named)
        self.calls += 1
        if self.expected is None and self.calls > 1:
            raise TaskError(
                "train.parallel.pipeline: loss() calls the model twice, and a pipeline runs once"
            )
        expected = self.expected
        if expected is not None and (
            len(call) != len(expected) or not all(map(torch.equal, call, expected))
        ):
            raise TaskError(
                f"train.parallel.pipeline: {self.method}() calls the model with other inputs than loss() does, and "
                "a pipeline runs once for both"
            )
        return self.output


def _checked(args: tuple[Any, ...], named: Mapping[str, Any]) -> ModelInputs:
    if named:
        raise TaskError(
            f"train.parallel.pipeline: loss() calls the model with {', '.join(named)} by name; a pipeline takes "
            "tensors by position"
        )
    for place, value in enumerate(args, start=1):
        if not isinstance(value, torch.Tensor):
            raise TaskError(
                "train.parallel.pipeline: a pipeline takes tensors, and what loss() calls the model with has a "
                f"{type(value).__name__} in place {place}"
            )
    return args
