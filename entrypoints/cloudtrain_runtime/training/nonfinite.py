"""Nonfinite losses and gradients: skip such steps, and end a run that cannot recover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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

_ADVICE = "lower the learning rate, lengthen train.warmup, set train.clip_grad_norm, or look for a bad sample"


class NonfiniteGuard:
    """Skips the steps whose gradient is not finite, and ends the run after too many in a row.

    All ranks decide alike without communication, because the global norm is the same on all of them.

    The norm is on the device, so the host waits for it in each step. The schedule does not count a skipped step.

    Args:
        limit: Largest number of steps in a row that may be skipped.
        scaler: The loss scale of fp16. As long as it can be lowered, the steps that it skips are reported, but do not
            count towards the limit.

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
    ) -> None:
        self.in_row = 0
        self.skipped = 0
        self.last_loss: torch.Tensor | None = None
        # The number of steps that the schedule must still leave out, which a checkpoint may have.
        self._owed = 0
        self._limit = limit
        self._optimizer = optimizer
        self._scaler = scaler
        self._mesh = mesh
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
        grad_norm = float(norm)
        if math.isfinite(grad_norm):
            self.in_row = 0
            self.last_loss = loss
            self._scaler.step(self._optimizer)
        else:
            self._skip(number, loss, grad_norm)
        if self._owed == 0:
            return True
        self._owed -= 1
        return False

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"in_row": self.in_row, "skipped": self.skipped, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state from a checkpoint."""
        self.in_row = state["in_row"]
        self.skipped = state["skipped"]
        self._owed = state["owed"]

    def _skip(self, number: int, share: torch.Tensor, grad_norm: float) -> None:
        self.skipped += 1
        self._owed += 1
        is_lowering_scale = self._scaler.is_enabled() and self._scaler.get_scale() > 1.0
        if not is_lowering_scale:
            self.in_row += 1
        loss = float(self._mesh.mean(share))
        if self._mesh.context.is_main:
            scale = {}
            if self._scaler.is_enabled():
                scale["loss_scale"] = self._scaler.get_scale()
            emit(
                "skipped",
                step=number,
                loss=loss,
                grad_norm=grad_norm,
                in_row=self.in_row,
                **scale,
            )
        if self.in_row > self._limit:
            self._fail(number, float(share))

    def _fail(self, number: int, share: float) -> None:
        context = self._mesh.context
        finite = gather(math.isfinite(share), context)
        nonfinite_ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        # A finite loss can have a nonfinite gradient: then the batch of any rank may be the cause.
        if not nonfinite_ranks or context.rank in nonfinite_ranks:
            self._save_batches(number, share)
        whose = "all ranks"
        if nonfinite_ranks:
            plural = "s" if len(nonfinite_ranks) > 1 else ""
            whose = f"rank{plural} {', '.join(map(str, nonfinite_ranks))}"
        raise JobError(
            f"the gradient was not finite in {self.in_row} steps in a row, the last is step {number}; "
            f"train.skip_nonfinite allows {self._limit}. The weights are those before these steps. "
            f"The micro-batches of {whose} are in output.tar.gz: "
            f"nonfinite/step-{number}-rank-N.pt, for torch.load(weights_only=True). "
            f"What to do: {_ADVICE}, and resume"
        )

    def _save_batches(self, number: int, loss: float) -> None:
        """Write this rank's micro-batches of the step to a file, as tensors on the CPU."""
        rank = self._mesh.context.rank
        path = self._mesh.context.output_dir / "nonfinite" / f"step-{number}-rank-{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        batches = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), self._batches)
        torch.save({"step": number, "rank": rank, "loss": loss, "batches": batches}, path)
        log_line(f"the micro-batches of step {number} on rank {rank} are saved in {path}")


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
