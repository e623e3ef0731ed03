"""Pipeline stages and schedules, built on torch.distributed.pipelining.

Separate from pipeline.py, because torch before 2.6 cannot import this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.nn import functional

from cloudtrain_runtime.distributed.layer_chain import Precision, TensorShape, as_tuple
from cloudtrain_runtime.distributed.model_proxy import ModelInputs
from cloudtrain_runtime.errors import TaskError

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
LOOPED = ("interleaved", "zero_bubble")
"""Schedules with two stages per rank."""


@dataclass
class PipelineStep:
    """The micro-batches of the current step: inputs of the first stage, and numbers of samples."""

    calls: list[ModelInputs] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StageSpec:
    """Position of a stage in the pipeline, and the shapes of its inputs and outputs."""

    index: int  # index of the stage in the pipeline
    stages: int  # number of stages of the pipeline
    takes: tuple[TensorShape, ...]  # shapes of its inputs
    returns: tuple[TensorShape, ...]  # shapes of its outputs
    device: torch.device  # device that computes it
    group: dist.ProcessGroup | None  # process group of the pipeline
    precision: Precision  # autocast context of its forward pass

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which receives the micro-batches."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, whose output the loss is computed from."""
        return self.index == self.stages - 1


class Stage(PipelineStage):
    """A stage that accepts micro-batches with different numbers of samples.

    Tensors between ranks have the size of the largest micro-batch: the sender pads them, the receiver removes the
    padding, so modules get real samples only.

    Args:
        link: Position and shapes of the stage.
        step: The micro-batches of the current step.
    """

    def __init__(self, module: nn.Module, link: StageSpec, step: PipelineStep) -> None:
        numbers = (torch.empty(1, dtype=torch.int64, device="meta"),)
        shapes: dict[str, Any] = {
            "input_args": numbers if link.is_first else tuple(map(_example, link.takes)),
            "output_args": tuple(map(_example, link.returns)),
        }
        super().__init__(module, link.index, link.stages, link.device, **shapes, group=link.group)
        self._link, self._step, self._micro_step = link, step, 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        self._micro_step = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def forward_maybe_with_nosync(self, *args: Any, **named: Any) -> Any:
        """Call the module with the samples of the micro-batch, without padding."""
        samples = self._step.samples[self._micro_step]
        if self._link.is_first:
            call = self._step.calls[
                self._micro_step
            ]  # torch passes only the number of the micro-batch
        else:
            call = tuple(
                _received(value, shape, samples)
                for value, shape in zip(args, self._link.takes, strict=True)
            )
        with self._link.precision():
            returned = super().forward_maybe_with_nosync(*call, **named)  # type: ignore[no-untyped-call]
        if self._link.is_last:
            return returned
        return tuple(
            _sent(value, shape, samples)
            for value, shape in checked_outputs(returned, self._link, samples)
        )


def checked_outputs(
    returned: Any, link: StageSpec, samples: int
) -> list[tuple[torch.Tensor, TensorShape]]:
    """Return the outputs of a stage, each with its shape.

    Raises:
        TaskError: the outputs differ in shape from those of the first micro-batch.
    """
    values = as_tuple(returned)
    expected = [shape.at(samples) for shape in link.returns]
    found = [
        tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        for value in values
    ]
    if found != expected:
        raise TaskError(
            f"train.parallel.pipeline: stage {link.index} passes on {_listed(found)}, and {_listed(expected)} was "
            "expected: micro-batches may differ in their number of samples only, so pad them to one length in collate()"
        )
    return list(zip(values, link.returns, strict=True))


def make_schedule(
    name: str,
    stages: Sequence[tuple[nn.Module, StageSpec]],
    step: PipelineStep,
    micro_steps: int,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[[], None]:
    """Return a function that runs a step with a number of micro-batches, which `step` holds when it is called.

    `loss` gets the last stage's output and the number of the micro-batch.
    """
    own = [Stage(module, link, step) for module, link in stages]
    count = stages[0][1].stages
    ranks = count // len(own)
    kind = _SCHEDULES[name]
    # The last step of an epoch may have fewer micro-batches than the schedule supports.
    if name == "1f1b" and micro_steps < ranks:
        kind = ScheduleGPipe
    if name in LOOPED and micro_steps % ranks:
        kind = ScheduleLoopedBFS
    own_stages = own if name in LOOPED else own[0]
    schedule = kind(own_stages, micro_steps, loss_fn=loss, **_supported(kind, scale_grads=False))
    numbers = torch.arange(micro_steps)
    inputs = (numbers,) if any(link.is_first for _, link in stages) else ()
    # The outputs are not needed after the loss; concatenating them would only take memory.
    options = _supported(schedule.step, return_outputs=False)
    if any(link.is_last for _, link in stages):
        options["target"] = numbers
    return partial(schedule.step, *inputs, **options)


def _supported(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that the installed torch supports."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def _example(shape: TensorShape) -> torch.Tensor:
    example = torch.empty(shape.sizes, dtype=shape.dtype, device="meta")
    return example.requires_grad_(shape.requires_grad)


def _received(value: torch.Tensor, shape: TensorShape, samples: int) -> torch.Tensor:
    """Return a received tensor without its padding."""
    real = value.view_as(value)
    for dimension, size in enumerate(shape.at(samples)):
        if size != value.shape[dimension]:
            real = real.narrow(dimension, 0, size)
    if real.requires_grad:
        # Only a contiguous gradient can be sent back.
        real.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return real


def _sent(value: torch.Tensor, shape: TensorShape, samples: int) -> torch.Tensor:
    """Return a tensor to send, padded to the largest number of samples."""
    value = value.to(shape.dtype)
    missing = [full - size for full, size in zip(shape.sizes, shape.at(samples), strict=True)]
    if any(missing):
        # pad() expects pairs (before, after) from the last dimension to the first.
        value = functional.pad(
            value, [amount for size in reversed(missing) for amount in (0, size)]
        )
    return value.contiguous()


def _listed(shapes: Sequence[Any]) -> str:
    return ", ".join(str(list(shape)) if isinstance(shape, tuple) else shape for shape in shapes)
