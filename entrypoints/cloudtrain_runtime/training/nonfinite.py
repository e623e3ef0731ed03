"""Losses and gradients that are not finite: steps that are left out, and runs that are ended before they cost more."""

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

from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

_MOST_LOGGED = 3
"""Logged losses in a row that are not finite, until the run is ended: no training recovers from that."""

_ADVICE = "lower the learning rate, lengthen train.warmup, set train.clip_grad_norm, or look for a bad sample"


@dataclass(frozen=True)
class _Step:
    """A step whose gradient is to be judged.

    Attributes:
        number: Optimizer steps done with it.
        loss: This rank's share.
        norm: Of the global gradient; on the host, or on its way there.
        ready: When it has come there; None for at once.
        batches: This rank's micro-batches.
    """

    number: int
    loss: torch.Tensor
    norm: torch.Tensor
    ready: torch.cuda.Event | None
    batches: list[Any]


class NonfiniteGuard:
    """Leaves out the steps whose gradient is not finite, and ends the run when there are too many in a row.

    All ranks decide alike, without asking each other: the global norm is the same everywhere.

    The norm is on the device. Where the optimizer leaves out a step by itself (on a GPU, one with `fused=True`), the
    host reads the norm one step later and nothing waits; with any other the host waits for it in each step. The
    schedule does not count a step that was left out; in the first case it learns of it one step later.

    Args:
        limit: Steps in a row that may be left out.
        optimizer: Takes the steps.
        scaler: The loss scale of fp16. While there is one to lower, what it leaves out is told and not counted.
        mesh: The grid of ranks.
        on_device: Whether the optimizer leaves out steps by itself; by default where that saves waiting.
    """

    def __init__(
        self,
        limit: int,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        mesh: Mesh,
        *,
        on_device: bool | None = None,
    ) -> None:
        self.in_row = 0
        self.skipped = 0
        self.last_loss: torch.Tensor | None = None  # of the last step that was not left out
        self._owed = 0  # moves of the schedule to leave out
        self._limit, self._optimizer, self._scaler, self._mesh = limit, optimizer, scaler, mesh
        self._on_device = mesh.place.device.type == "cuda" and is_fused(optimizer) if on_device is None else on_device
        self._pending: _Step | None = None
        self._batches: list[Any] = []

    def keeping(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a step's micro-batches, and keep them until it is judged."""
        self._batches = []
        for batch in batches:
            self._batches.append(batch)
            yield batch

    def step(self, number: int, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Take the optimizer's step if the gradient is finite; return whether the schedule moves on.

        Args:
            number: Optimizer steps done with this one.
            loss: This rank's share of the mean loss, a scalar.
            norm: Of the global gradient, a scalar.

        Raises:
            JobError: too many steps in a row had to be left out.
        """
        if self._on_device:
            self._step_on_device(number, loss, norm)
        elif self._is_finite(_Step(number, loss, norm, None, self._batches)):
            self._scaler.step(self._optimizer)
        if self._owed == 0:
            return True
        self._owed -= 1
        return False

    def settle(self) -> None:
        """Judge the last step, which may not have been yet. Called by all ranks together, before a save."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._is_finite(pending)

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"in_row": self.in_row, "skipped": self.skipped, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what a checkpoint has kept."""
        self.in_row, self.skipped, self._owed = state["in_row"], state["skipped"], state["owed"]

    def _step_on_device(self, number: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf = torch.isfinite(norm).logical_not().float()
        self._scaler.step(optimizer)  # with fp16 it puts its own flag there
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf
        step = _Step(number, loss, *_to_host(norm), self._batches)
        self.settle()
        self._pending = step

    def _is_finite(self, step: _Step) -> bool:
        if step.ready is not None:
            step.ready.synchronize()
        if math.isfinite(float(step.norm)):
            self.in_row = 0
            self.last_loss = step.loss
            return True
        self.skipped += 1
        self._owed += 1
        is_search = self._scaler.is_enabled() and self._scaler.get_scale() > 1.0
        if not is_search:
            self.in_row += 1
        loss = float(self._mesh.mean(step.loss))
        if self._mesh.place.is_main:
            scale = {"loss_scale": self._scaler.get_scale()} if self._scaler.is_enabled() else {}
            emit("skipped", step=step.number, loss=loss, grad_norm=float(step.norm), in_row=self.in_row, **scale)
        if self.in_row > self._limit:
            self._end(step)
        return False

    def _end(self, step: _Step) -> None:
        place = self._mesh.place
        share = float(step.loss)
        saw = [rank for rank, is_finite in enumerate(gather(math.isfinite(share), place)) if not is_finite]
        # A loss may be finite and its gradient not: then any rank's batch may be the one.
        if not saw or place.rank in saw:
            _keep(step, share, place.rank, place.output_dir)
        whose = f"rank{'s' if len(saw) > 1 else ''} {', '.join(map(str, saw))}" if saw else "all ranks"
        raise JobError(
            f"the gradient was not finite in {self.in_row} steps in a row, the last is step {step.number}; "
            f"train.skip_nonfinite allows {self._limit}. The weights are as before them. The micro-batches of {whose} "
            f"are in output.tar.gz: nonfinite/step-{step.number}-rank-N.pt, for torch.load(weights_only=True). What to "
            f"do: {_ADVICE}, and resume"
        )


def are_weights_finite(parameters: Iterable[torch.Tensor], place: Context, group: dist.ProcessGroup | None) -> bool:
    """Return whether all weights are finite on all ranks, which call this together.

    Args:
        parameters: Those of this rank, sharded or not.
        place: This rank's place.
        group: All ranks, on the CPU; None for one rank.
    """
    own = [value.to_local() if isinstance(value, DTensor) else value for value in parameters]
    is_finite = not own or bool(torch.stack([value.detach().isfinite().all() for value in own]).all())
    return all(gather(is_finite, place, group))


def fail_nonfinite_export(part: str, step: int, newest: int | None) -> NoReturn:
    """End a run that has come to its end with values that are not finite.

    Args:
        part: What is not finite.
        step: The last step.
        newest: Step of the newest checkpoint of this attempt, or None.

    Raises:
        JobError: always.
    """
    left = "" if newest is None else f" The newest checkpoint is of step {newest}."
    raise JobError(
        f"training ended at step {step}, and its {part} not finite: no model is exported.{left} What to do: "
        f"{_ADVICE}; train.skip_nonfinite leaves out such steps, train.export_nonfinite: true exports the model anyway"
    )


class LossMonitor:
    """Watches the logged losses, where no one looks at each step."""

    def __init__(self) -> None:
        self.in_row = 0
        self._has_warned = False

    def note(self, step: int, loss: float, *, is_main: bool) -> None:
        """Note a logged loss, the mean over all ranks.

        Raises:
            JobError: it was not finite several times in a row.
        """
        if math.isfinite(loss):
            self.in_row = 0
            return
        self.in_row += 1
        if self.in_row >= _MOST_LOGGED:
            raise JobError(
                f"the loss was not finite at {self.in_row} logged steps in a row, the last is step {step}: no training "
                f"recovers from that. What to do: {_ADVICE}, and resume from a checkpoint before; "
                "train.skip_nonfinite leaves out such steps"
            )
        if is_main and not self._has_warned:
            self._has_warned = True
            log_line(
                f"warning: the loss of step {step} is not finite. No checkpoint is written while it is, and the run "
                f"ends at the {_MOST_LOGGED}rd logged step in a row"
            )


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer leaves out a step by itself, by the flag that torch's own loss scale gives it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _to_host(norm: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Begin to copy a scalar to the host; return it, and the event at which it will be there."""
    if norm.device.type != "cuda":
        return norm.clone(), None
    there = torch.empty((), dtype=norm.dtype, pin_memory=True)
    there.copy_(norm, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(norm.device))
    return there, event


def _keep(step: _Step, loss: float, rank: int, folder: Path) -> None:
    """Write a rank's micro-batches of a step, as tensors on the CPU."""
    path = folder / "nonfinite" / f"step-{step.number}-rank-{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), step.batches)
    torch.save({"step": step.number, "rank": rank, "loss": loss, "batches": batches}, path)
    log_line(f"the micro-batches of step {step.number} on rank {rank} are kept in {path}")
