"""The training loop, top to bottom.

Shapes: a batch's first dimension is samples. `loss` is the mean over them, a scalar.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cloudtrain_runtime import ranks, watch
from cloudtrain_runtime.checkpoint import Checkpoints
from cloudtrain_runtime.context import Context
from cloudtrain_runtime.contract import CheckpointConfig, EarlyStopping, TrainConfig
from cloudtrain_runtime.data import DataState, Position, Step, make_evaluation, make_feeder
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.events import emit, say
from cloudtrain_runtime.parallel.gradients import clip, fit_to_meshes, make_scaler
from cloudtrain_runtime.parallel.mesh import Mesh
from cloudtrain_runtime.parallel.replicas import synchronised
from cloudtrain_runtime.parallel.sharding import PRECISIONS
from cloudtrain_runtime.parallel.spread import spread, whole_weights
from cloudtrain_runtime.schedules import default_schedule
from cloudtrain_runtime.seeds import seed_everything
from cloudtrain_runtime.task import Task, checked_datasets, checked_loss, checked_metrics

LOG_EVERY_VARIABLE = "CLOUDTRAIN_LOG_EVERY_STEPS"
_LOG_EVERY_STEPS = 10


@dataclass
class Patience:
    """State of early stopping."""

    best: float | None = None
    waited: int = 0

    def is_over(self, rule: EarlyStopping, value: float) -> bool:
        """Note an evaluation; return whether it is time to stop."""
        sign = 1.0 if rule.mode == "min" else -1.0
        if self.best is None or sign * (self.best - value) > rule.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= rule.patience


@dataclass
class Meter:
    """Samples per second since the last reading."""

    samples: int = 0
    began: float = field(default_factory=time.monotonic)

    def read(self) -> float:
        """Return samples per second and start anew."""
        now = time.monotonic()
        rate = self.samples / max(now - self.began, 1e-9)
        self.samples, self.began = 0, now
        return rate


class Trainer:
    """One Task in training on one rank.

    Args:
        task: The user's Task.
        train: The job's train section.
        checkpoint: The job's checkpoint section.
        place: This rank's place.
    """

    def __init__(self, task: Task, train: TrainConfig, checkpoint: CheckpointConfig, place: Context) -> None:
        self.task, self.train, self.place, self.checkpoint = task, train, place, checkpoint
        self.datasets = checked_datasets(task)
        self.mesh = Mesh.of(train.parallel, place)
        self.scaler = make_scaler(place.device, self.mesh, enabled=train.precision == "fp16")
        seed_everything(train.seed)  # the same on all ranks: they build the same model
        built = spread(task, train, self.mesh, self.scaler.scale)
        self.model, self.replica, self.pipeline = built.model, built.replica, built.pipeline
        # A sharded model computes in its own precision; what it returns is fp32.
        precision = None if self.mesh.is_sharded else PRECISIONS.get(train.precision)
        self.autocast: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if precision is None else torch.autocast(place.device.type, dtype=precision)
        )
        self.optimizer = task.optimizer(self.model)
        fit_to_meshes(self.optimizer)
        self.feeder = make_feeder(
            self.datasets["train"],
            task.collate,
            place,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data_size,
            seed=train.seed,
            workers=train.workers,
        )
        self.checkpoints = Checkpoints(checkpoint, place, mesh=self.mesh.sizes)
        self.last_step = self.total_steps
        self.schedule = task.schedule(self.optimizer) or default_schedule(self.optimizer, train, lambda: self.last_step)
        self.patience = Patience()
        self.log_every = int(os.environ.get(LOG_EVERY_VARIABLE, _LOG_EVERY_STEPS))
        self.meter = Meter()
        self.saved_step = -1
        self.evaluated_step = -1
        self.has_warned = False
        # Dropout and augmentation differ between ranks, but for those that share each layer.
        self.own_seed = train.seed + 1 + self.mesh.data_rank + 1_009 * self.mesh.stage
        seed_everything(self.own_seed)

    # ------------------------------------------------------------ the whole run

    def run(self) -> None:
        """Train from the newest checkpoint to the end, or to the notice to stop."""
        resumed = self._resume()
        self.last_step = self.total_steps
        began, first = time.monotonic(), self.position.step
        parameters = self.mesh.count_parameters(self.model)
        if self.place.is_main:
            emit(
                "started",
                run=self.place.run,
                step=self.position.step,
                epoch=self.position.epoch,
                total_steps=self.total_steps,
                world_size=self.place.world_size,
                hosts=len(self.place.hosts),
                device=self.place.device.type,
                backend=self.place.backend,
                parameters=parameters,
                train_samples=self.feeder.length,
                global_batch=self.feeder.global_size,
                mesh={name: size for name, size in self.mesh.sizes.items() if size > 1},
                resumed_from=resumed,
                restarts=self.place.restarts,
                torch=torch.__version__,
            )
        with self.checkpoints.notice.acted_upon():
            is_complete = self._epochs()
        if not is_complete:
            if self.place.is_main:
                emit("stopped", step=self.position.step, epoch=self.position.epoch)
            return
        self._save(wait=True)
        seconds = time.monotonic() - began
        final: dict[str, Mapping[str, float]] = {
            split: self.evaluate(split) for split in ("validation", "test") if split in self.datasets
        }
        with watch.exempt():  # as long as the disk takes
            self._export(final)
        if self.place.is_main:
            samples = (self.position.step - first) * self.feeder.global_size
            rate = samples / seconds if samples else None
            emit(
                "finished",
                step=self.position.step,
                epochs=self.position.epoch,
                seconds=seconds,
                samples_per_second=rate,
            )

    @property
    def position(self) -> Position:
        """How far training has come."""
        return self.feeder.position

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, those before a resume at another batch size included.

        None where the data does not tell its length.
        """
        if self.train.steps is not None:
            return self.train.steps
        length = self.feeder.length
        if length is None:
            return None
        done = self.position.epoch * length + self.position.samples
        # Each epoch ends with a step, be it a small one.
        whole, part = divmod(max((self.train.epochs or 0) * length - done, 0), length)
        return self.position.step + sum(
            epochs * math.ceil(samples / self.feeder.global_size) for epochs, samples in ((whole, length), (1, part))
        )

    def _is_at_end(self) -> bool:
        if self.train.steps is not None:
            return self.position.step >= self.train.steps
        return self.position.epoch >= (self.train.epochs or 0)

    def _epochs(self) -> bool:
        """Train until the end; return False when the run was told to stop before."""
        if self._ends_here():
            return True
        while not self._is_at_end():
            self.replica.train()
            for step in self.feeder.epoch():
                self._step(step)
                due = self.checkpoints.at_boundary(self.position.step)
                # A run that must stop has no time to evaluate; it does so when it is resumed.
                ends_here = not due.stop and self._ends_here()
                if due.save or due.stop:
                    self._save(wait=due.stop)
                if due.stop or ends_here:
                    return ends_here
                if self._is_at_end():
                    break
        return True

    # ------------------------------------------------------------ one step

    def _step(self, step: Step) -> None:
        """Take one optimizer step and move the position behind its samples."""
        plan = step.plan
        # Each sample weighs 1 / samples of the global batch, however unevenly ranks and micro-steps share them.
        # Gradients are averaged over the data ranks, hence the factor.
        weight = self.mesh.data_size / plan.samples
        weights = [micro.count * weight for micro in plan.micro_batches]
        forward_backward = self._accumulate if self.pipeline is None else self.pipeline.run
        total = forward_backward(step.batches, weights)
        self.scaler.unscale_(self.optimizer)
        grad_norm = None
        if self.train.clip_grad_norm is not None:
            grad_norm = clip(self.model.parameters(), self.train.clip_grad_norm, self.mesh)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.schedule is not None:
            self.schedule.step()
        self.feeder.advance()
        self.place.progress.step = self.position.step
        watch.tick(self.position.step)
        self.meter.samples += plan.samples
        if self.position.step % self.log_every == 0 or self.position.step == 1 or self._is_at_end():
            self._log(total, grad_norm)

    def _accumulate(self, batches: Iterable[Any], weights: Sequence[float]) -> torch.Tensor:
        """Add up gradients; the last backward pass synchronises them. Return this rank's share of the mean loss."""
        shares: list[torch.Tensor] = []
        for left, weight, batch in zip(range(len(weights) - 1, -1, -1), weights, batches, strict=False):
            with synchronised(self.replica, now=left == 0):
                with self.autocast:
                    loss = self._loss(batch)
                    if weight != 1.0:  # else two operations for nothing
                        loss = loss * weight
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            shares.append(loss.detach().float())
        return sum(shares[1:], shares[0])

    def _loss(self, batch: Any) -> torch.Tensor:
        try:
            return checked_loss(self.task, self.replica, batch)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise TaskError(
                "the model has parameters that the loss does not depend on, so ranks wait for gradients that never "
                "come: remove them from the model, or set requires_grad_(False) on them"
            ) from None

    def _log(self, total: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        loss = self.mesh.mean(total)
        if self.place.is_main:
            if not math.isfinite(loss) and not self.has_warned:
                self.has_warned = True
                say(f"warning: the loss of step {self.position.step} is not finite; training goes on")
            extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
            emit(
                "step",
                step=self.position.step,
                epoch=self.position.epoch,
                loss=float(loss),
                samples_per_second=self.meter.read(),
                learning_rate=float(self.optimizer.param_groups[0]["lr"]),
                **extra,
            )

    # ------------------------------------------------------------ evaluation

    def _ends_here(self) -> bool:
        """Evaluate if this step asks for it and it has not been done; return whether training ends early."""
        if self._evaluation_is_due():
            self._note(self.evaluate("validation"))
            self.evaluated_step = self.position.step
        rule = self.train.early_stopping
        return rule is not None and self.patience.waited >= rule.patience

    def _evaluation_is_due(self) -> bool:
        if "validation" not in self.datasets or self._is_at_end():
            return False  # the last one is part of the end of the run
        if self.position.step in (0, self.evaluated_step):
            return False
        if self.train.evaluate_every_steps is not None:
            return self.position.step % self.train.evaluate_every_steps == 0
        return self.position.samples == 0

    def _note(self, values: Mapping[str, float]) -> None:
        """Count the evaluations that did not improve the metric of early stopping."""
        rule = self.train.early_stopping
        if rule is None:
            return
        name = rule.metric.removeprefix("validation/")
        if name not in values:
            raise TaskError(f"train.early_stopping.metric: no {rule.metric}; the Task measures {', '.join(values)}")
        if self.patience.is_over(rule, values[name]) and self.place.is_main:
            say(f"{rule.metric} has not improved for {rule.patience} evaluations: training ends here")

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Return loss and the Task's metrics over a split: exact means, each sample counted once."""
        batches = make_evaluation(
            self.datasets[split],
            self.task.collate,
            self.place,
            batch_size=self.train.batch_size,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data_size,
            even=not self.mesh.is_plain,
            workers=self.train.workers,
        )
        sums: dict[str, float] = {}
        self.mesh.share_buffers(self.model)
        self.model.eval()
        # The plain model: ranks have different numbers of batches, so its forward pass must not talk to others.
        for micro, batch in batches:
            watch.stir()
            with self.autocast:
                values = {
                    "loss": checked_loss(self.task, self.model, batch) * micro.count,
                    **checked_metrics(self.task, self.model, batch, micro.samples),
                }
            for name, value in values.items() if micro.count and self.mesh.tensor_rank == 0 else ():
                sums[name] = sums.get(name, 0.0) + float(value.double().sum())
        self.replica.train()
        means: dict[str, float] = {}
        for part in ranks.gather(sums, self.place):
            for name, value in part.items():
                means[name] = means.get(name, 0.0) + value / batches.samples
        if self.place.is_main:
            emit(
                "evaluation",
                split=split,
                step=self.position.step,
                epoch=self.position.epoch,
                samples=batches.samples,
                **means,
            )
        return means

    # ------------------------------------------------------------ saving

    def _save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint of this step, with `wait` until it is complete."""
        step = self.position.step
        if self.saved_step == step and (not wait or self.checkpoints.is_complete(step)):
            return
        self.mesh.share_buffers(self.model)
        state = {
            "data": self.feeder.state().to_json(),
            "patience": asdict(self.patience),
            "evaluated_step": self.evaluated_step,
        }
        objects = {
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
        }
        if self.checkpoints.save(self.position.step, self.model, [self.optimizer], state, objects, wait=wait):
            self.saved_step = self.position.step

    def _resume(self) -> str | None:
        """Load the checkpoint to start from; return its uri, or None for a new run."""
        found = self.checkpoints.resume(self.model, [self.optimizer])
        if found.uri is None:
            return None
        objects = found.objects
        if not found.has_random:  # more ranks than saved it: this one's go on from nobody's
            seed_everything(self.own_seed + 1_000_003 * found.step)
        notes = self.feeder.resume(DataState.from_json(found.state["data"]))
        self.patience = Patience(**found.state["patience"])
        self.evaluated_step = found.state["evaluated_step"]
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(objects["scaler"])
        if self.schedule is not None and objects["schedule"] is not None:
            self.schedule.load_state_dict(objects["schedule"])
        self.place.progress.step = self.position.step
        if found.is_own:
            self.saved_step = self.position.step
        if self.place.is_main and self._is_at_end():
            say(f"nothing is left to train: {found.uri} is at the end already")
        for note in notes if self.place.is_main else ():
            say(note)
        return found.uri

    def _export(self, final: Mapping[str, Mapping[str, float]]) -> None:
        """Write the model folder: model.pt and metrics.json."""
        weights = whole_weights(self.model, self.mesh)
        if not self.place.is_main:
            return
        folder = self.place.model_dir
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, folder / "model.pt")
        (folder / "metrics.json").write_text(json.dumps(final, indent=1) + "\n", encoding="utf-8")
