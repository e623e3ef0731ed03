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
from cloudtrain_runtime.task import Batch, Task, checked_loss, checked_metrics, checked_prediction

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


def loss_from_output(task: Task, output: Any, batch: Batch, *, training: bool) -> torch.Tensor:
    """Return the Task's loss of a batch for which the pipeline returned `output`.

    Raises:
        TaskError: the loss is not a scalar, or loss() calls the model twice.
    """
    return checked_loss(task, _OutputProxy(output).train(training), batch)


def metrics_from_output(
    task: Task, output: Any, call: ModelInputs, batch: Batch, samples: int
) -> Mapping[str, torch.Tensor]:
    """Return the Task's metrics of an evaluation batch for which the pipeline returned `output`.

    Raises:
        TaskError: metrics() calls the model with other inputs than loss() does.
    """
    return checked_metrics(task, _OutputProxy(output, call).eval(), batch, samples)


def prediction_from_output(
    task: Task, output: Any, call: ModelInputs, batch: Batch, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and true classes of an evaluation batch for which the pipeline returned `output`.

    Raises:
        TaskError: predict() calls the model with other inputs than loss() does.
    """
    return checked_prediction(task, _OutputProxy(output, call, "predict").eval(), batch, samples)


class _Called(BaseException):
    """Ends loss() at its call of the model. Not an Exception, which loss() might catch."""

    def __init__(self, call: ModelInputs) -> None:
        super().__init__()
        self.call = call


class _ModelProxy(nn.Module):
    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"with train.parallel.pipeline a loss can only call the model: there is no model.{name}")


class _InputCapture(_ModelProxy):
    def forward(self, *args: Any, **named: Any) -> NoReturn:
        raise _Called(_checked(args, named))


class _OutputProxy(_ModelProxy):
    """Returns a given output: for one call of loss(), or for calls of another method with the same inputs."""

    def __init__(self, output: Any, expected: ModelInputs | None = None, method: str = "metrics") -> None:
        super().__init__()
        self.output, self.expected, self.method, self.calls = output, expected, method, 0

    def forward(self, *args: Any, **named: Any) -> Any:
        call = _checked(args, named)
        self.calls += 1
        if self.expected is None and self.calls > 1:
            raise TaskError("train.parallel.pipeline: loss() calls the model twice, and a pipeline runs once")
        expected = call if self.expected is None else self.expected
        if len(call) != len(expected) or not all(map(torch.equal, call, expected)):
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
