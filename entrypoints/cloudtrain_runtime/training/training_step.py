"""One step of a Task with several optimizers: its `training_step`, and the updates that this asks for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from cloudtrain_runtime.contract.nearest_name import did_you_mean
from cloudtrain_runtime.data import Step
from cloudtrain_runtime.distributed.gradients import clip_gradients
from cloudtrain_runtime.distributed.uneven_inputs import suppress_gradients
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.metrics.step_timer import Phase
from cloudtrain_runtime.task import check_batch, kind_of, location_of
from cloudtrain_runtime.training.optimizer_step import StepParts
from cloudtrain_runtime.training.schedules import advance


class TrainingStep:
    """Takes the steps of several optimizers on one rank, as the Task's `training_step` does.

    Attributes:
        losses: The mean loss of each optimizer's last update, in the last logged step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._task = parts.task
        self._mesh = parts.mesh
        self._model = parts.built.model
        self._autocast = parts.autocast
        self._most = parts.train.clip_grad_norm or math.inf
        self._optimizers = parts.optimizers
        self._scaler = parts.scaler
        self._schedules = parts.schedules
        self._clock = parts.meter.clock
        # The samples of this step: on this rank, and on all.
        self._samples = 0
        self._global_samples = 1
        self._needs_norm = False
        # This rank's shares of the mean losses of this step.
        self._shares: dict[str, torch.Tensor] = {}
        self._norms: dict[str, torch.Tensor] = {}
        self.losses: Mapping[str, torch.Tensor] = {}
        # No replica of DDP has done it.
        self._mesh.share(parameter.detach() for parameter in self._model.parameters())

    def run(
        self, step: Step, number: int, *, is_logged: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take one step. Arguments and result are those of `OptimizerStep.run`.

        Losses are added up over the optimizers, those of each one's last update, and so is the square of the norm.
        """
        ((micro, batch),) = step
        if number == 1:
            check_batch(self._task, batch)
        self._samples = micro.count
        self._global_samples = step.plan.samples
        self._needs_norm = is_logged or self._most != math.inf
        self._shares = {}
        self._norms = {}
        self._mesh.share_buffers(self._model)
        self._clock.mark(Phase.FORWARD)
        # A placeholder sample takes part in collectives and must not change the weights.
        has_samples = micro.count > 0
        effect = contextlib.nullcontext() if has_samples else suppress_gradients(self._model)
        with effect, self._autocast:
            self._task.training_step(self._model, batch, self._update)
        if not self._shares:
            raise self._error("must call update(name, loss) in each step; it did not")
        self._clock.mark(Phase.OPTIMIZER)
        for schedule in self._schedules.values():
            advance(schedule)
        if is_logged:
            self.losses = {name: self._mesh.mean(share) for name, share in self._shares.items()}
        norm = None
        if self._norms:
            norm = torch.linalg.vector_norm(torch.stack([*self._norms.values()]))
        return torch.stack([*self._shares.values()]).sum(), norm

    def _update(self, name: str, loss: torch.Tensor) -> None:
        """Take a step of one optimizer with the gradients of a loss: the mean over this rank's samples."""
        self._check_update(name, loss)
        optimizer = self._optimizers[name]
        given = [each for group in optimizer.param_groups for each in group["params"]]
        parameters = [each for each in given if each.requires_grad]
        optimizer.zero_grad()
        self._clock.mark(Phase.BACKWARD)
        # A backward pass computes as its forward pass did.
        with torch.autocast(loss.device.type, enabled=False):
            self._backward(name, loss, parameters)
            self._clock.mark(Phase.OPTIMIZER)
            if self._mesh.data_size > 1:
                self._average(parameters)
            self._scaler.unscale_(optimizer)
            if self._needs_norm:
                self._norms[name] = clip_gradients(parameters, self._most, self._mesh)
            self._scaler.step(optimizer)
            self._scaler.update()
        optimizer.zero_grad()
        # The cache has the weights before this step.
        torch.clear_autocast_cache()
        weight = self._samples * self._mesh.data_size / self._global_samples
        share = loss.detach().float().reshape(()) * weight
        self._shares[name] = share if self._samples else torch.zeros_like(share)
        self._clock.mark(Phase.FORWARD)

    def _backward(self, name: str, loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        try:
            if parameters:
                torch.autograd.backward(self._scaler.scale(loss), inputs=parameters)
        except RuntimeError as error:
            text = str(error)
            if "modified by an inplace operation" not in text and "second time" not in text:
                raise
            raise self._error(
                f"must compute the loss of update({name!r}) after the update before it, from outputs that no other "
                "loss was computed from (or from .detach() of them)"
            ) from None
        if all(parameter.grad is None for parameter in parameters):
            raise self._error(
                f"must call update({name!r}) with a loss that depends on the parameters of this optimizer; none of its "
                f"{len(parameters)} trainable parameters got a gradient"
            )

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Replace the gradients by their mean over all samples of all ranks."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            own = [parameter for parameter in parameters if parameter.dtype == dtype]
            parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
            flat = torch.cat([part.reshape(-1) for part in parts])
            if self._samples:
                flat *= self._samples / self._global_samples
            else:
                # Not a product, because a gradient may be NaN.
                flat.zero_()
            has_gradient = torch.tensor(
                [each.grad is not None for each in own], dtype=dtype, device=flat.device
            )
            flat = torch.cat([flat, has_gradient])
            dist.all_reduce(flat, group=self._mesh.data_group)
            *gradients, ranks = torch.split(flat, [*(each.numel() for each in own), len(own)])
            is_used = [True] * len(own)
            if any(each.grad is None for each in own):
                # Read only where this rank has no gradient of a parameter, because that waits for
                # the device.
                is_used = (ranks > 0).tolist()
            for parameter, gradient, is_present in zip(own, gradients, is_used, strict=True):
                parameter.grad = gradient.view_as(parameter) if is_present else None

    def _check_update(self, name: str, loss: object) -> None:
        if name not in self._optimizers:
            hint = did_you_mean(str(name), list(self._optimizers))
            raise self._error(
                f"called update({name!r}), and optimizer() returns none of this name; {hint}"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = kind_of(loss)
            if isinstance(loss, torch.Tensor):
                got = f"a tensor of shape {list(loss.shape)}"
            raise self._error(
                f"must call update({name!r}) with a scalar loss, the mean over the samples; it got {got}"
            )
        if not loss.requires_grad:
            raise self._error(
                f"must call update({name!r}) with a loss that depends on the model's parameters; this one has no "
                "gradient: was it detached, made from .item(), or computed under no_grad?"
            )

    def _error(self, message: str) -> TaskError:
        return TaskError(
            f"{location_of(type(self._task), 'training_step')}training_step() {message}"
        )
