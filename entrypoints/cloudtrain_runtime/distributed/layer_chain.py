"""Model as a chain of modules (links): output shapes, measured times, and the split into pipeline stages."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cloudtrain_runtime.distributed.model_proxy import ModelInputs
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.metrics.bandwidth import synchronize
from cloudtrain_runtime.task import Task

_ROUNDS = 5
"""Timed passes of each link after a warm-up; the fastest counts. The same on ranks that share layers."""

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class TensorShape:
    """Shape of a tensor as a function of the samples in its micro-batch."""

    sizes: tuple[int, ...]  # shape with the largest number of samples
    growth: tuple[int, ...]  # growth of each size per sample
    samples: int  # largest number of samples of a micro-batch
    dtype: torch.dtype  # type of the tensor
    requires_grad: bool  # whether a gradient flows back through it

    @classmethod
    def of(cls, tensor: torch.Tensor, smaller: torch.Tensor, samples: int) -> TensorShape:
        """Return the shape of a tensor, from one with all samples and one with a sample less."""
        growth = tuple(size - less for size, less in zip(tensor.shape, smaller.shape, strict=True))
        return cls(tuple(tensor.shape), growth, samples, tensor.dtype, tensor.requires_grad)

    def at(self, samples: int) -> tuple[int, ...]:
        """Return the sizes with a number of samples."""
        missing = self.samples - samples
        return tuple(
            size - missing * growth for size, growth in zip(self.sizes, self.growth, strict=True)
        )

    def samples_of(self, tensor: torch.Tensor) -> int:
        """Return the number of samples of a tensor."""
        for size, most, growth in zip(tensor.shape, self.sizes, self.growth, strict=False):
            if growth:
                return self.samples - (most - size) // growth
        return self.samples


@dataclass(frozen=True)
class ChainProfile:
    """Shapes and costs of the links, measured with one micro-batch."""

    call: tuple[TensorShape, ...]  # shapes of the inputs of the first link
    passed: tuple[tuple[TensorShape, ...], ...]  # shapes of the outputs of each link
    seconds: tuple[float, ...]  # time of the forward and backward pass of each link
    # estimated operations of each link's forward pass: FLOPs of matrix products plus the number of outputs
    work: tuple[float, ...]


class StageModule(nn.Module):
    """The links of one pipeline stage, as one module."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(links)

    def forward(self, *values: Any) -> Any:
        """Call each link with the outputs of the previous one."""
        for link in self.links:
            values = as_tuple(link(*values))
        return values[0] if len(values) == 1 else values


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return the outputs of a link as the inputs of the next one."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def chain_of(task: Task, model: nn.Module, stages: int) -> list[nn.Module]:
    """Return the Task's chain.

    Raises:
        TaskError: it is not a list of modules, is too short, or does not cover the model.
    """
    links = list(task.pipeline(model, stages))
    for link in links:
        if not isinstance(link, nn.Module):
            raise TaskError(f"pipeline() must return modules; one is a {type(link).__name__}")
    if len(links) < stages:
        raise TaskError(f"pipeline() returned {len(links)} modules, and there are {stages} stages")
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {parameter for link in links for parameter in link.parameters()}
    left = [name for parameter, name in names.items() if parameter not in held]
    if left:
        raise TaskError(
            f"pipeline() leaves out {', '.join(left[:3])}: each parameter of the model must belong to a module of the "
            "chain, so move it into the one that uses it"
        )
    if not held <= names.keys():
        raise TaskError("pipeline() returned a module with parameters that are not the model's")
    return links


def profile_chain(
    links: Sequence[nn.Module],
    call: ModelInputs,
    smaller: ModelInputs,
    device: torch.device,
    precision: Precision,
) -> ChainProfile:
    """Run a micro-batch through the chain forward and backward, link by link, and measure each link.

    Only one link at a time is on the device, so the model may be larger than its memory.

    Args:
        links: The chain, on any device.
        call: Inputs of the first link with the largest number of samples.
        smaller: Inputs with one sample less, or the same inputs if there is only one sample.
        device: Device that computes the links.
        precision: The autocast context of training.

    Raises:
        TaskError: a link does not return tensors.
    """
    from torch.utils.flop_counter import FlopCounterMode

    samples = _samples(call, smaller)
    passed: list[tuple[TensorShape, ...]] = []
    seconds: list[float] = []
    work: list[float] = []
    values, fewer = call, smaller
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for place, link in enumerate(links):
            probe, return_to = _on_device(link, device)
            buffers = [buffer.clone() for buffer in probe.buffers()]
            outputs, best = _timed(probe, place, values, device, precision)
            counter = FlopCounterMode(display=False)
            with torch.no_grad(), precision(), counter:
                fewer = _checked(probe(*fewer), place)
            work.append(float(counter.get_total_flops() + sum(output.numel() for output in fewer)))
            for buffer, before in zip(probe.buffers(), buffers, strict=True):
                buffer.copy_(before)
            probe.to(return_to)
            passed.append(
                tuple(
                    TensorShape.of(output, less, samples)
                    for output, less in zip(outputs, fewer, strict=True)
                )
            )
            values = tuple(
                output.detach().requires_grad_(output.requires_grad) for output in outputs
            )
            seconds.append(best)
    shapes = tuple(
        TensorShape.of(value, less, samples) for value, less in zip(call, smaller, strict=True)
    )
    return ChainProfile(shapes, tuple(passed), tuple(seconds), tuple(work))


def balance_stages(seconds: Sequence[float], parts: int) -> list[int]:
    """Return the number of links of each part, in order, that minimises the time of the slowest part."""
    until = [0.0, *itertools.accumulate(seconds)]
    # best[end]: time of the slowest part when the first `end` links form `part` parts of at least one link each, and
    # the sizes of these parts. Of equal times, the first split counts.
    best: list[tuple[float, list[int]]] = [(math.inf, [])] * len(until)
    best[0] = (0.0, [])
    for part in range(1, parts + 1):
        longer = []
        for end, total in enumerate(until):
            splits = [
                (max(best[start][0], total - until[start]), start) for start in range(part - 1, end)
            ]
            worst, start = min(splits, default=(math.inf, 0))
            longer.append((worst, [*best[start][1], end - start]))
        best = longer
    return best[-1][1]


def split_chain(
    links: Sequence[nn.Module], sizes: Sequence[int], model: nn.Module
) -> list[StageModule]:
    """Split the chain into stages; raise a TaskError if two stages share a parameter."""
    ends = list(itertools.accumulate(sizes))
    parts = [StageModule(links[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    owners: dict[nn.Parameter, int] = {}
    for stage, part in enumerate(parts):
        for parameter in part.parameters():
            if owners.setdefault(parameter, stage) != stage:
                name = next(name for name, other in model.named_parameters() if other is parameter)
                raise TaskError(
                    f"train.parallel.pipeline: stages {owners[parameter]} and {stage} share the parameter {name} (tied "
                    "weights), and stages are on different ranks"
                )
    return parts


def drop_other_stages(
    model: nn.Module, own: Collection[nn.Module], others: Collection[nn.Module]
) -> None:
    """Remove parameters and buffers of other ranks' stages from a model, in place, by setting them to None.

    The remaining ones keep their names in the state_dict.
    """
    kept = {module for part in own for module in part.modules()}
    gone = {module for part in others for module in part.modules()} - kept
    for module in model.modules():
        if module in gone:
            held = (module.named_parameters, module.named_buffers)
            for name in [
                name for named in held for name, _ in named(recurse=False, remove_duplicate=False)
            ]:
                setattr(module, name, None)


def _samples(call: ModelInputs, smaller: ModelInputs) -> int:
    """Return the number of samples: the size of the dimension that differs by one between the two calls."""
    for one, two in zip(call, smaller, strict=True):
        for size, less in zip(one.shape, two.shape, strict=True):
            if size == less + 1:
                return size
    return 1


def _on_device(link: nn.Module, device: torch.device) -> tuple[nn.Module, torch.device]:
    """Move a link to a device; return it and the device to move it back to."""
    own_device = next((parameter.device for parameter in link.parameters()), device)
    if own_device.type != "meta":
        return link.to(device), own_device
    probe = copy.deepcopy(link).to_empty(device=device)
    with torch.no_grad():
        for tensor in [*probe.parameters(), *probe.buffers()]:
            tensor.zero_()
    return probe, torch.device("meta")


def _timed(
    link: nn.Module, place: int, values: ModelInputs, device: torch.device, precision: Precision
) -> tuple[ModelInputs, float]:
    """Return the outputs of a link, and the seconds of its forward and backward pass."""
    best = math.inf
    outputs: ModelInputs = ()
    for turn in range(_ROUNDS + 1):
        synchronize(device)
        began = time.perf_counter()
        with precision():
            outputs = _checked(link(*values), place)
        flowing = [output for output in outputs if output.requires_grad]
        if flowing:
            torch.autograd.backward(flowing, [torch.ones_like(output) for output in flowing])
        synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - began)
        link.zero_grad(set_to_none=True)
        for value in values:
            value.grad = None
    return outputs, best


def _checked(returned: Any, place: int) -> ModelInputs:
    values = as_tuple(returned)
    for value in values:
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            raise TaskError(
                f"train.parallel.pipeline: link {place} of the chain returns a {type(value).__name__}; links pass on "
                "plain tensors, or a tuple of them"
            )
    return values
