"""Nonfinite losses and gradients: skip such steps, and end a run that cannot recover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from cloudtrain_runtime.distributed.gradients import LossScaler
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

_MAX_NONFINITE_LOGS = 3
"""Nonfinite logged losses in a row that end the run: no training recovers from that."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused form reads `found_inf`."""

_ADVICE = "lower the learning rate, lengthen train.warmup, set train.clip_grad_norm, or look for a bad sample"


@dataclass(frozen=True)
class _PendingStep:
    """A step whose gradient norm has not been checked."""

    # optimizer steps done, including this one
    number: int
    # this rank's share of the mean loss
    loss: torch.Tensor
    # of the global gradient, on the host or being copied there
    norm: torch.Tensor
    # at which the copy is complete; None if it is
    ready: torch.cuda.Event | None
    # this rank's micro-batches
    batches: list[Any]


class NonfiniteGuard:
    """Skips the steps whose gradient is not finite, and ends the run after too many in a row.

    All ranks decide alike without communication, because the global norm is the same on all of them.

    The norm is on the device. If the optimizer can skip a step by itself (on a GPU, one with `fused=True`), the host
    reads the norm one step later and does not wait for the device; otherwise it waits in each step. The schedule does
    not count a skipped step; in the first case it is corrected one step later.

    Args:
        limit: Largest number of steps in a row that may be skipped.
        scaler: The loss scale of fp16. As long as it can be lowered, the steps that it skips are reported, but do not
            count towards the limit.
        on_device: Whether the optimizer skips steps by itself; by default where that avoids waiting.

    Attributes:
        in_row: Skipped steps in a row.
        skipped: Skipped steps of the run.
        last_loss: This rank's share of the loss of the last step that was not skipped.
    """

    def __init__(
        self,
        limit: int,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        mesh: Mesh,
        *,
        on_device: bool | None = None,
    ) -> None:
        self.in_row = 0
        self.skipped = 0
        self.last_loss: torch.Tensor | None = None
        # The number of steps that the schedule must still leave out.
        self._owed = 0
        self._limit = limit
        self._optimizer = optimizer
        self._scaler = scaler
        self._mesh = mesh
        if on_device is None:
            on_device = mesh.context.device.type == "cuda" and is_fused(optimizer)
        self._on_device = on_device
        self._pending: _PendingStep | None = None
        self._batches: list[Any] = []

    def recording(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a step's micro-batches, and keep them until its gradient norm is checked."""
        self._batches = []
        for batch in batches:
            self._batches.append(batch)
            yield batch

    def step(self, number: int, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Take the optimizer's step if the gradient is finite; return whether the schedule should advance.

        `number` counts this step, too. `loss` is this rank's share of the mean; `norm` is of the global gradient.

        Raises:
            JobError: too many steps in a row were skipped.
        """
        if self._on_device:
            self._step_on_device(number, loss, norm)
        elif self._is_finite(
            _PendingStep(number=number, loss=loss, norm=norm, ready=None, batches=self._batches)
        ):
            self._scaler.step(self._optimizer)
        if self._owed == 0:
            return True
        self._owed -= 1
        return False

    def settle(self) -> None:
        """Check the last step, if that is pending. All ranks call this together before a save."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            self._is_finite(pending)

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"in_row": self.in_row, "skipped": self.skipped, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state from a checkpoint."""
        self.in_row = state["in_row"]
        self.skipped = state["skipped"]
        self._owed = state["owed"]

    def _step_on_device(self, number: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf = torch.isfinite(norm).logical_not().float()
        # With fp16 the scaler sets found_inf itself.
        self._scaler.step(optimizer)
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf
        copy, ready = _to_host(norm)
        step = _PendingStep(number=number, loss=loss, norm=copy, ready=ready, batches=self._batches)
        self.settle()
        self._pending = step

    def _is_finite(self, step: _PendingStep) -> bool:
        if step.ready is not None:
            step.ready.synchronize()
        if math.isfinite(float(step.norm)):
            self.in_row = 0
            self.last_loss = step.loss
            return True
        self.skipped += 1
        self._owed += 1
        is_lowering_scale = self._scaler.is_enabled() and self._scaler.get_scale() > 1.0
        if not is_lowering_scale:
            self.in_row += 1
        loss = float(self._mesh.mean(step.loss))
        if self._mesh.context.is_main:
            scale = {}
            if self._scaler.is_enabled():
                scale["loss_scale"] = self._scaler.get_scale()
            emit(
                "skipped",
                step=step.number,
                loss=loss,
                grad_norm=float(step.norm),
                in_row=self.in_row,
                **scale,
            )
        if self.in_row > self._limit:
            self._fail(step)
        return False

    def _fail(self, step: _PendingStep) -> None:
        context = self._mesh.context
        share = float(step.loss)
        finite = gather(math.isfinite(share), context)
        nonfinite_ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        # A finite loss can have a nonfinite gradient: then the batch of any rank may be the cause.
        if not nonfinite_ranks or context.rank in nonfinite_ranks:
            _save_batches(step, share, context.rank, context.output_dir)
        whose = "all ranks"
        if nonfinite_ranks:
            plural = "s" if len(nonfinite_ranks) > 1 else ""
            whose = f"rank{plural} {', '.join(map(str, nonfinite_ranks))}"
        raise JobError(
            f"the gradient was not finite in {self.in_row} steps in a row, the last is step {step.number}; "
            f"train.skip_nonfinite allows {self._limit}. The weights are those before these steps. "
            f"The micro-batches of {whose} are in output.tar.gz: "
            f"nonfinite/step-{step.number}-rank-N.pt, for torch.load(weights_only=True). "
            f"What to do: {_ADVICE}, and resume"
        )


def are_weights_finite(
    parameters: Iterable[torch.Tensor], context: Context, group: dist.ProcessGroup | None
) -> bool:
    """Return whether all weights, sharded or not, are finite on all ranks. All ranks call this together.

    `group` is a process group of all ranks for tensors on the CPU; None for one rank.
    """
    own = [value.to_local() if isinstance(value, DTensor) else value for value in parameters]
    # A rank without parameters has nothing to check.
    is_finite = True
    if own:
        is_finite = bool(torch.stack([value.detach().isfinite().all() for value in own]).all())
    return all(gather(is_finite, context, group))


def fail_nonfinite_export(part: str, step: int, newest: int | None) -> NoReturn:
    """Fail a run that ends with nonfinite values instead of exporting its model.

    Args:
        part: What is not finite, with its verb, such as `weights are`.
        step: The last step.
        newest: Step of the newest checkpoint of this attempt; None without one.
    """
    left = "" if newest is None else f" The newest checkpoint is of step {newest}."
    raise JobError(
        f"training ended at step {step}, and its {part} not finite: no model is exported.{left} What to do: "
        f"{_ADVICE}; train.skip_nonfinite skips such steps, train.export_nonfinite: true exports the model anyway"
    )


class LossMonitor:
    """Watches the logged losses of a run without `train.skip_nonfinite`."""

    def __init__(self) -> None:
        self.in_row = 0
        self._has_warned = False

    def record(self, step: int, loss: float, *, is_main: bool) -> None:
        """Record a logged loss, the mean over all ranks.

        Raises:
            JobError: the loss was not finite several times in a row.
        """
        if math.isfinite(loss):
            self.in_row = 0
            return
        self.in_row += 1
        if self.in_row >= _MAX_NONFINITE_LOGS:
            raise JobError(
                f"the loss was not finite at {self.in_row} logged steps in a row, the last is step {step}: no training "
                f"recovers from that. What to do: {_ADVICE}, and resume from a checkpoint before; "
                "train.skip_nonfinite skips such steps"
            )
        if is_main and not self._has_warned:
            self._has_warned = True
            log_line(
                f"warning: the loss of step {step} is not finite. No checkpoint is written while it is, and the run "
                f"ends at the {_MAX_NONFINITE_LOGS}rd logged step in a row"
            )


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can skip a step by itself: one of torch's, in its fused form."""
    if not isinstance(optimizer, _FUSED):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def _to_host(norm: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start to copy a scalar to the host; return the copy, and the event at which it is complete."""
    if norm.device.type != "cuda":
        return norm.clone(), None
    copy = torch.empty((), dtype=norm.dtype, pin_memory=True)
    copy.copy_(norm, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(norm.device))
    return copy, event


def _save_batches(step: _PendingStep, loss: float, rank: int, folder: Path) -> None:
    """Write a rank's micro-batches of a step to a file, as tensors on the CPU."""
    path = folder / "nonfinite" / f"step-{step.number}-rank-{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), step.batches)
    torch.save({"step": step.number, "rank": rank, "loss": loss, "batches": batches}, path)
    log_line(f"the micro-batches of step {step.number} on rank {rank} are saved in {path}")
