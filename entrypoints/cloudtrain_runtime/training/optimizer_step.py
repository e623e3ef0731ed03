"""One optimizer step: forward and backward passes of its micro-batches, clipping, and the update.

Shapes: a batch's first dimension is samples. A loss is a scalar.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.data import Step
from cloudtrain_runtime.distributed.ddp import (
    GradientArrivals,
    replicate,
    shorten,
    synchronised,
)
from cloudtrain_runtime.distributed.gradients import LossScaler, clip_gradients
from cloudtrain_runtime.distributed.loss_weights import LossWeights
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import DistributedModel
from cloudtrain_runtime.distributed.uneven_inputs import suppress_gradients
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.metrics.meter import Meter
from cloudtrain_runtime.metrics.step_timer import Phase
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.task import (
    BatchLoss,
    Task,
    check_batch,
    checked_loss,
    location_of,
)
from cloudtrain_runtime.training.nonfinite import NonfiniteGuard
from cloudtrain_runtime.training.schedules import advance

_NO_EFFECT = contextlib.nullcontext()


@dataclass(frozen=True)
class StepParts:
    """What a step uses: the model, and one optimizer with an empty name, or those of a training step by name."""

    task: Task
    train: TrainConfig
    mesh: Mesh
    built: DistributedModel
    # of a forward pass; entered for each
    autocast: AbstractContextManager[Any]
    meter: Meter
    optimizers: Mapping[str, torch.optim.Optimizer]
    # the loss scale of fp16
    scaler: LossScaler
    # of the learning rate, by the name of the optimizer
    schedules: Mapping[str, LRScheduler | None]
    # None where `train.skip_nonfinite` is not set
    guard: NonfiniteGuard | None


class OptimizerStep:
    """Takes optimizer steps on one rank.

    Attributes:
        losses: Mean losses of the last logged step, where it has several.
    """

    def __init__(self, parts: StepParts) -> None:
        self._task = parts.task
        self._train = parts.train
        self._mesh = parts.mesh
        self._autocast = parts.autocast
        self._replica = parts.built.replica
        self._pipeline = parts.built.pipeline
        self._names = {each: name for name, each in parts.built.model.named_parameters()}
        self._parameters = list(self._names)
        self._trainable = self._read_trainable()
        self._arrivals = self._record_arrivals()
        (self._optimizer,) = parts.optimizers.values()
        (self._schedule,) = parts.schedules.values()
        self._scaler = parts.scaler
        self._guard = parts.guard
        self.losses: Mapping[str, torch.Tensor] = {}
        self._meter = parts.meter
        self._clock = parts.meter.clock
        self._number = 0
        self._has_summed_loss: bool | None = None
        # Gradients of the previous step are freed just before the next ones replace them. On a CPU
        # this spares the kernel from mapping new pages in each step; on a GPU they would occupy
        # memory next to the activations.
        self._zero_grad_in_forward = (
            self._mesh.context.device.type == "cpu" and self._pipeline is None
        )

    def run(
        self, step: Step, number: int, *, is_logged: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take one optimizer step.

        Args:
            step: Its samples.
            number: Optimizer steps done, including this one.
            is_logged: Whether its gradient norm is needed for the log.

        Returns:
            This rank's share of the mean loss, and the norm of the global gradient where it was computed.
        """
        self._number = number
        self._follow_trainable()
        weights = LossWeights(
            [micro.count for micro in step.plan.micro_batches],
            step.plan.samples,
            self._mesh.data_size,
        )
        batches = self._batches(step)
        if self._guard is not None:
            batches = self._guard.recording(batches)
        forward_backward = self._accumulate if self._pipeline is None else self._pipeline.run
        total = forward_backward(batches, weights)
        self._clock.mark(Phase.OPTIMIZER)
        self._scaler.unscale_(self._optimizer)
        # The first stages of a pipeline see no loss.
        if self._has_summed_loss is None:
            self._has_summed_loss = any(gather(weights.is_summed, self._mesh.context))
        if self._has_summed_loss:
            total = weights.settle(total, self._parameters, self._mesh)
        grad_norm = None
        should_advance_schedule = True
        most = self._train.clip_grad_norm
        if most is not None or self._guard is not None or is_logged:
            grad_norm = clip_gradients(self._parameters, most or math.inf, self._mesh)
        if self._guard is None:
            self._scaler.step(self._optimizer)
        elif grad_norm is not None:
            should_advance_schedule = self._guard.step(number, total, grad_norm)
        self._scaler.update()
        if not self._zero_grad_in_forward:
            self._zero_grad()
        if should_advance_schedule:
            advance(self._schedule)
        return total, grad_norm

    def _batches(self, step: Step) -> Iterator[Any]:
        """Yield a step's micro-batches, and mark on the clock which phase follows each."""
        # A pipeline requests all micro-batches before it begins; its forward and backward passes
        # are one phase.
        phase = Phase.FORWARD if self._pipeline is None else Phase.BACKWARD
        for micro, batch in step:
            if self._meter.wants_batch:
                self._meter.count_batch_flops(batch, micro.samples)
            self._clock.mark(phase)
            yield batch
            self._clock.mark(Phase.DATA)
        if self._pipeline is not None:
            # The pipeline has all micro-batches now, and begins.
            self._clock.mark(phase)

    def _accumulate(self, batches: Iterable[Any], weights: LossWeights) -> torch.Tensor:
        """Add up gradients; the last backward pass synchronises them. Return this rank's sum of weighted losses."""
        shares: list[torch.Tensor] = []
        last = len(weights.counts) - 1
        for number, batch in zip(range(last + 1), batches, strict=False):
            has_samples = weights.counts[number] > 0
            effect = _NO_EFFECT if has_samples else suppress_gradients(self._replica)
            if self._arrivals is not None and number == last:
                self._arrivals.begin()
            with synchronised(self._replica, now=number == last), effect:
                with self._autocast:
                    loss = weights.weigh(self._loss(batch), number)
                self._clock.mark(Phase.BACKWARD)
                if self._zero_grad_in_forward and not shares:
                    self._zero_grad()
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            share = loss.detach().float()
            shares.append(share if has_samples else torch.zeros_like(share))
        if self._arrivals is not None:
            self._arrivals.require_all()
            self._require_same_trainable()
        return sum(shares[1:], shares[0])

    def _zero_grad(self) -> None:
        # Of all parameters, including those that no optimizer has: their gradients would add up
        # from step to step and count in the norm.
        for parameter in self._parameters:
            parameter.grad = None

    def _loss(self, batch: Any) -> BatchLoss:
        if self._number == 1:
            check_batch(self._task, batch)
        return checked_loss(self._task, self._replica, batch)

    def _read_trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _record_arrivals(self) -> GradientArrivals | None:
        if not isinstance(self._replica, DistributedDataParallel):
            return None
        return GradientArrivals(self._replica, self._names)

    def _follow_trainable(self) -> None:
        """Replicate the model anew where the Task has frozen or unfrozen parameters since the last step.

        DDP averages the gradients of the parameters that were trainable when it was created, and of no others.
        """
        if self._read_trainable() == self._trainable:
            return
        if self._pipeline is not None:
            raise TaskError(
                f"the Task has changed requires_grad of {self._changed()}, and a pipeline does not support this: "
                "freeze parameters in model() and resume with other code.args, or use data: fsdp"
            )
        self._trainable = self._read_trainable()
        # FSDP reads requires_grad in each step.
        if not self._mesh.is_plain:
            return
        self._zero_grad()
        if self._arrivals is not None:
            self._arrivals.end()
        if isinstance(self._replica, DistributedDataParallel):
            self._replica = self._replica.module
            # The former replica refers to itself, and its hooks end with it.
            gc.collect()
        parallel = self._train.parallel
        is_fixed = self._train.deterministic
        self._replica = replicate(self._replica, parallel, self._mesh, deterministic=is_fixed)
        self._arrivals = self._record_arrivals()

    def _require_same_trainable(self) -> None:
        """Raise a TaskError if the loss has unfrozen parameters: nothing has averaged their gradients."""
        if self._read_trainable() == self._trainable:
            return
        where = location_of(type(self._task), "loss")
        raise TaskError(
            f"{where}loss() has changed requires_grad of {self._changed()}: change it between steps, in after_step()"
        )

    def _changed(self) -> str:
        """Return the names of parameters that were frozen or unfrozen since the replica was created."""
        now = self._read_trainable()
        pairs = zip(self._names.values(), now, self._trainable, strict=True)
        return shorten([name for name, is_trainable, was in pairs if is_trainable != was])
