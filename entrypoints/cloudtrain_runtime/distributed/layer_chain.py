"""A model as a chain of links: what they pass on, how long they take, and into which stages they go."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cloudtrain_runtime.distributed.model_proxy import ModelInputs
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import Task

_ROUNDS = 5
"""Timed passes of each link, after one that is not; the fastest counts. Ranks that share layers must make as many."""

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class TensorShape:
    """Sizes of a tensor as its micro-batch has more or fewer samples.

    Attributes:
        sizes: With as many samples as a micro-batch can have.
        growth: How much each size grows by a sample.
        samples: As many samples as a micro-batch can have.
        dtype: Of the tensor.
        requires_grad: Whether a gradient flows back through it.
    """

    sizes: tuple[int, ...]
    growth: tuple[int, ...]
    samples: int
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, smaller: torch.Tensor, samples: int) -> TensorShape:
        """Return the shape of a tensor that is seen with all samples and with one less."""
        growth = tuple(size - less for size, less in zip(tensor.shape, smaller.shape, strict=True))
        return cls(tuple(tensor.shape), growth, samples, tensor.dtype, tensor.requires_grad)

    def at(self, samples: int) -> tuple[int, ...]:
        """Return the sizes with so many samples."""
        missing = self.samples - samples
        return tuple(size - missing * growth for size, growth in zip(self.sizes, self.growth, strict=True))

    def samples_of(self, tensor: torch.Tensor) -> int:
        """Return how many samples a tensor has."""
        for size, most, growth in zip(tensor.shape, self.sizes, self.growth, strict=False):
            if growth:
                return self.samples - (most - size) // growth
        return self.samples


@dataclass(frozen=True)
class ChainProfile:
    """What a micro-batch showed.

    Attributes:
        call: Shapes of what the first link is called with.
        passed: Shapes of what each link returns.
        seconds: Forward and backward pass of each link.
        work: Operations of each link's forward pass, about: products of matrices, and numbers that it returns.
    """

    call: tuple[TensorShape, ...]
    passed: tuple[tuple[TensorShape, ...], ...]
    seconds: tuple[float, ...]
    work: tuple[float, ...]


class StageModule(nn.Module):
    """Some links of the chain, as one module."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(links)

    def forward(self, *values: Any) -> Any:
        """Call each link with what the one before has returned."""
        for link in self.links:
            values = as_tuple(link(*values))
        return values[0] if len(values) == 1 else values


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return what a link has returned, as what the next one is called with."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def chain_of(task: Task, model: nn.Module, stages: int) -> list[nn.Module]:
    """Return the Task's chain.

    Raises:
        TaskError: it is no chain of modules, too short, or not all of the model.
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
    links: Sequence[nn.Module], call: ModelInputs, smaller: ModelInputs, device: torch.device, precision: Precision
) -> ChainProfile:
    """Bring a micro-batch through the chain, link by link, forward and backward.

    A model that is too large for one device fits, because only one link at a time is on it.

    Args:
        links: The chain, wherever it lies.
        call: What the first link is called with, with as many samples as a micro-batch can have.
        smaller: The same with one sample less; or the same again where one is all.
        device: Where it is computed.
        precision: The autocast of training.

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
                tuple(TensorShape.of(output, less, samples) for output, less in zip(outputs, fewer, strict=True))
            )
            values = tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)
            seconds.append(best)
    shapes = tuple(TensorShape.of(value, less, samples) for value, less in zip(call, smaller, strict=True))
    return ChainProfile(shapes, tuple(passed), tuple(seconds), tuple(work))


def balance_stages(seconds: Sequence[float], parts: int) -> list[int]:
    """Return how many links go into each part, in order, so that the slowest part is as fast as can be."""
    count = len(seconds)
    until = [0.0, *itertools.accumulate(seconds)]
    # slowest[end]: of the first `end` links in so many parts; each part has one link at least.
    slowest: list[float] = [0.0] + [math.inf] * count
    chosen: list[list[int]] = []
    for part in range(1, parts + 1):
        ends = range(part, count + 1)
        starts = {
            end: min(range(part - 1, end), key=lambda start: max(slowest[start], until[end] - until[start]))
            for end in ends
        }
        slowest = [
            max(slowest[starts[end]], until[end] - until[starts[end]]) if end in starts else math.inf
            for end in range(count + 1)
        ]
        chosen.append([starts.get(end, 0) for end in range(count + 1)])
    sizes: list[int] = []
    end = count
    for starts_of in reversed(chosen):
        sizes.insert(0, end - starts_of[end])
        end = starts_of[end]
    return sizes


def split_chain(links: Sequence[nn.Module], sizes: Sequence[int], model: nn.Module) -> list[StageModule]:
    """Return the chain in parts.

    Raises:
        TaskError: two parts share a parameter.
    """
    ends = list(itertools.accumulate(sizes))
    parts = [StageModule(links[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    owners: dict[nn.Parameter, int] = {}
    for stage, part in enumerate(parts):
        for parameter in part.parameters():
            if owners.setdefault(parameter, stage) != stage:
                name = next(name for name, other in model.named_parameters() if other is parameter)
                raise TaskError(
                    f"train.parallel.pipeline: stages {owners[parameter]} and {stage} share the parameter {name} (tied "
                    "weights), and each lies on ranks of its own"
                )
    return parts


def drop_other_stages(model: nn.Module, own: Collection[nn.Module], others: Collection[nn.Module]) -> None:
    """Take what other ranks' parts hold out of a model, in place: parameters and buffers become None.

    So what remains keeps its names, in the state_dict and for whoever looks through the model.
    """
    kept = {module for part in own for module in part.modules()}
    gone = {module for part in others for module in part.modules()} - kept
    for module in model.modules():
        if module in gone:
            for held in (module._parameters, module._buffers):  # noqa: SLF001 (a registered name may become None)
                held.update(dict.fromkeys(held))


def _samples(call: ModelInputs, smaller: ModelInputs) -> int:
    """Return how many samples a call has: what it is of that dimension which shrank by one."""
    pairs = [(size, less) for one, two in zip(call, smaller, strict=True) for size, less in _sizes(one, two)]
    return next((size for size, less in pairs if size == less + 1), 1)


def _sizes(tensor: torch.Tensor, smaller: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, smaller.shape, strict=True)


def _on_device(link: nn.Module, device: torch.device) -> tuple[nn.Module, torch.device]:
    """Return a link on a device, and where to put it afterwards."""
    lies_on = next((parameter.device for parameter in link.parameters()), device)
    if lies_on.type != "meta":
        return link.to(device), lies_on
    probe = copy.deepcopy(link).to_empty(device=device)
    with torch.no_grad():
        for tensor in [*probe.parameters(), *probe.buffers()]:
            tensor.zero_()
    return probe, torch.device("meta")


def _timed(
    link: nn.Module, place: int, values: ModelInputs, device: torch.device, precision: Precision
) -> tuple[ModelInputs, float]:
    """Return what a link returns, and the seconds of its forward and backward pass."""
    best = math.inf
    outputs: ModelInputs = ()
    for turn in range(_ROUNDS + 1):
        _wait_for(device)
        began = time.perf_counter()
        with precision():
            outputs = _checked(link(*values), place)
        flowing = [output for output in outputs if output.requires_grad]
        if flowing:
            torch.autograd.backward(flowing, [torch.ones_like(output) for output in flowing])
        _wait_for(device)
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


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
