"""The training loop, top to bottom.

Shapes: a batch's first dimension is samples. `loss` is the mean over them, a scalar.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cloudtrain_runtime.checkpoint.safe_metadata import check_serializable
from cloudtrain_runtime.checkpoint.script_api import CheckpointManager, Resumed
from cloudtrain_runtime.contract import CheckpointConfig, EarlyStopping, TrainConfig
from cloudtrain_runtime.contract.manifest import BEST_STATE
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.data import DataState, Position, Step, make_feeder
from cloudtrain_runtime.distributed.ddp import synchronised
from cloudtrain_runtime.distributed.fsdp import PRECISIONS
from cloudtrain_runtime.distributed.gradients import clip, fit_to_meshes, make_scaler
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import spread, whole_weights
from cloudtrain_runtime.distributed.uneven_inputs import without_effect
from cloudtrain_runtime.errors import CheckpointError, JobError, TaskError
from cloudtrain_runtime.metrics import NUMBERS, Meter, Phase
from cloudtrain_runtime.metrics.profiler import Profiling
from cloudtrain_runtime.metrics.tensorboard import Board
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import Row
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.seeds import seed_everything
from cloudtrain_runtime.task import (
    Task,
    check_batch,
    checked_datasets,
    checked_loss,
    checked_optimizer,
    checked_schedule,
    collate_of,
)
from cloudtrain_runtime.training import determinism
from cloudtrain_runtime.training.best_checkpoint import Best, Mark, measured
from cloudtrain_runtime.training.classification import Analysis
from cloudtrain_runtime.training.evaluation import Evaluations, Measured
from cloudtrain_runtime.training.nonfinite import (
    Guard,
    Losses,
    are_weights_finite,
    refuse_export,
)
from cloudtrain_runtime.training.schedules import default_schedule

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
        # What is not finite improves nothing: nothing could ever be better than it.
        if math.isfinite(value) and (self.best is None or sign * (self.best - value) > rule.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= rule.patience


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
        if train.deterministic:
            determinism.enforce()
        self.datasets = checked_datasets(task)
        self.best = Best.of(train, self.datasets)
        self.mesh = Mesh.of(train.parallel, place)
        self.scaler = make_scaler(place.device, self.mesh, enabled=train.precision == "fp16")
        self.checkpoints = CheckpointManager(checkpoint, place, mesh=self.mesh.sizes, numbers=1 + NUMBERS)
        # Stages stay as they were measured at first: a resumed run must not sum in another order.
        stages = self.checkpoints.peek_state().get("pipeline") if self.mesh.pipeline > 1 else None
        seed_everything(train.seed)  # the same on all ranks: they build the same model
        built = spread(task, train, self.mesh, self.scaler.scale, self.datasets["train"], stages)
        self.model, self.replica, self.pipeline = built.model, built.replica, built.pipeline
        self.parameters = list(self.model.parameters())
        # A sharded model computes in its own precision; what it returns is fp32.
        precision = None if self.mesh.is_sharded else PRECISIONS.get(train.precision)
        self.autocast: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if precision is None else torch.autocast(place.device.type, dtype=precision)
        )
        self.optimizer = checked_optimizer(task, self.model)
        # Gradients of the step before are freed just before the next ones take their place. On a CPU that spares the
        # kernel from finding new pages in each step; on a GPU they would stand beside the activations.
        self.frees_late = place.device.type == "cpu" and self.pipeline is None
        fit_to_meshes(self.optimizer)
        limit = train.skip_nonfinite
        self.guard = None if limit is None else Guard(limit, self.optimizer, self.scaler, self.mesh)
        self.losses = Losses()
        self.evaluations = Evaluations(task, self.datasets, train, self.mesh, built, self.autocast)
        self.feeder = make_feeder(
            self.datasets["train"],
            collate_of(task),
            place,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data_size,
            seed=train.seed,
            workers=train.workers,
        )
        self.last_step = self.total_steps
        self.schedule = checked_schedule(task, self.optimizer) or default_schedule(
            self.optimizer, train, lambda: self.last_step
        )
        self.patience = Patience()
        self.log_every = int(os.environ.get(LOG_EVERY_VARIABLE, _LOG_EVERY_STEPS))
        self.meter = Meter(task, built.shape, train.precision, place, self.mesh.stage)
        self.clock = self.meter.clock
        self.profiling = Profiling(place, self.clock, train.profile_at, train.profile_steps)
        self.board: Board | None = None
        self.saved_step = -1
        self.evaluated_step = -1
        self.last_loss: torch.Tensor | None = None
        self.is_lost = False
        # Dropout and augmentation differ between ranks, but for those that share each layer.
        self.own_seed = train.seed + 1 + self.mesh.data_rank + 1_009 * self.mesh.stage
        seed_everything(self.own_seed)

    # ------------------------------------------------------------ the whole run

    @determinism.explained()
    def run(self) -> None:
        """Train from the newest checkpoint to the end, or to the notice to stop."""
        resumed = self._resume()
        self.last_step = self.total_steps
        began, first = time.monotonic(), self.position.step
        parameters = self.mesh.count_parameters(self.model)
        if self.place.is_main and self.train.tensorboard:
            self.board = Board(ml_tree(os.environ).tensorboard, first)
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
        with self.checkpoints.notice.handling_signals():
            try:
                is_complete = self._epochs()
            except BaseException:
                # The last log may tell why. What fails here as well must not hide the cause.
                with contextlib.suppress(RuntimeError, JobError):
                    self.checkpoints.poll(wait=False)
                self.checkpoints.wait_after_failure()
                raise
        if not is_complete:
            self.profiling.close()  # all is saved by now
            if self.place.is_main:
                emit("stopped", step=self.position.step, epoch=self.position.epoch)
            return
        self._save(wait=True)
        self.profiling.close()
        seconds = time.monotonic() - began
        self.feeder.close()
        self._finish()
        self.checkpoints.require_completed()
        if self.place.is_main:
            samples = (self.position.step - first) * self.feeder.global_size
            rate = samples / seconds if samples else None
            emit(
                "finished",
                step=self.position.step,
                epochs=self.position.epoch,
                seconds=seconds,
                samples_per_second=rate,
                **({} if self.best is None or self.best.mark is None else {"best_step": self.best.mark.step}),
                **({} if self.guard is None else {"skipped": self.guard.skipped}),
            )
        if self.board is not None:
            self.board.close()

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
            self.clock.mark(Phase.DATA)
            for step in self.feeder.epoch():
                self.profiling.before(self.position.step + 1)
                logged = self._step(step)
                due = self.checkpoints.at_boundary(self.position.step, logged)
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

    def _step(self, step: Step) -> Row | None:
        """Take one optimizer step and move the position behind its samples. Return its log, which wants a loss."""
        plan = step.plan
        is_logged = self._is_logged(self.position.step + 1)
        self.clock.begin(is_logged=is_logged)
        # Each sample weighs 1 / samples of the global batch, however unevenly ranks and micro-steps share them.
        # Gradients are averaged over the data ranks, hence the factor.
        weight = self.mesh.data_size / plan.samples
        weights = [micro.count * weight for micro in plan.micro_batches]
        batches = self._batches(step) if self.guard is None else self.guard.keeping(self._batches(step))
        forward_backward = self._accumulate if self.pipeline is None else self.pipeline.run
        total = forward_backward(batches, weights)
        self.clock.mark(Phase.OPTIMIZER)
        self.scaler.unscale_(self.optimizer)
        grad_norm, moves_on = None, True
        if self.train.clip_grad_norm is not None or self.guard is not None or is_logged:
            grad_norm = clip(self.parameters, self.train.clip_grad_norm or math.inf, self.mesh)
        if self.guard is None:
            self.scaler.step(self.optimizer)
        elif grad_norm is not None:
            moves_on = self.guard.step(self.position.step + 1, total, grad_norm)
        self.scaler.update()
        if not self.frees_late:
            self._free_gradients()
        if self.schedule is not None and moves_on:
            self.schedule.step()
        self.last_loss = total
        self.feeder.advance()
        self.place.progress.step = self.position.step
        heartbeat.tick(self.position.step)
        self.meter.samples += plan.samples
        logged = self._log(total, grad_norm) if is_logged or self._is_at_end() else None
        self.clock.mark(Phase.CHECKPOINT)
        return logged

    def _is_logged(self, step: int) -> bool:
        return step % self.log_every == 0 or step == 1

    def _batches(self, step: Step) -> Iterator[Any]:
        """Yield a step's micro-batches, and tell the clock who has its time."""
        # A pipeline asks for all before it begins: it goes forward and backward in one, and waits in both.
        phase = Phase.FORWARD if self.pipeline is None else Phase.BACKWARD
        for micro, batch in step:
            if self.meter.wants_batch:
                self.meter.see(batch, micro.samples)
            self.clock.mark(phase)
            yield batch
            self.clock.mark(Phase.DATA)
        if self.pipeline is not None:
            self.clock.mark(phase)  # it has them all, and begins

    def _accumulate(self, batches: Iterable[Any], weights: Sequence[float]) -> torch.Tensor:
        """Add up gradients; the last backward pass synchronises them. Return this rank's share of the mean loss."""
        shares: list[torch.Tensor] = []
        for left, weight, batch in zip(range(len(weights) - 1, -1, -1), weights, batches, strict=False):
            has_samples = weight != 0.0
            effect = contextlib.nullcontext() if has_samples else without_effect(self.replica)
            with synchronised(self.replica, now=left == 0), effect:
                with self.autocast:
                    loss = self._loss(batch)
                    if weight != 1.0:  # else two operations for nothing
                        loss = loss * weight
                self.clock.mark(Phase.BACKWARD)
                if self.frees_late and not shares:
                    self._free_gradients()
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            share = loss.detach().float()
            shares.append(share if has_samples else torch.zeros_like(share))
        return sum(shares[1:], shares[0])

    def _free_gradients(self) -> None:
        # Of all parameters: those that no optimizer has would add up for ever, and count in the norm.
        for parameter in self.parameters:
            parameter.grad = None

    def _loss(self, batch: Any) -> torch.Tensor:
        if self.position.step == 0:
            check_batch(self.task, batch)
        try:
            return checked_loss(self.task, self.replica, batch)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise TaskError(
                "the model has parameters that the loss does not depend on, so ranks wait for gradients that never "
                "come: remove them from the model, or set requires_grad_(False) on them"
            ) from None

    def _log(self, total: torch.Tensor, grad_norm: torch.Tensor | None) -> Row:
        """Read what is seen of the steps since the last log; it is told when all ranks' shares of the loss are here."""
        self.clock.mark(Phase.LOG)
        at, share = self.position, float(total)  # a GPU has done its steps then
        read, numbers = self.meter.read()
        seen = {
            **read,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            **({} if grad_norm is None else {"grad_norm": float(grad_norm)}),
        }

        def take(rows: list[list[float]]) -> None:
            self.meter.compare([row[1:] for row in rows])
            loss = sum(row[0] for row in rows) * self.mesh.weight
            if self.place.is_main:
                fields = {"step": at.step, "epoch": at.epoch, "loss": loss, **seen}
                emit("step", **fields)
                if self.board is not None:
                    self.board.step(at.step, fields)
            if self.guard is None:
                self.losses.note(at.step, loss, is_main=self.place.is_main)

        return Row((share, *numbers), take)

    # ------------------------------------------------------------ evaluation

    def _ends_here(self) -> bool:
        """Evaluate if this step asks for it and it has not been done; return whether training ends early."""
        if self._evaluation_is_due():
            values = self._evaluate("validation").means
            self.evaluated_step = self.position.step
            self._note(values)
            if self._is_best(values):
                self.checkpoints.wait_for_save()  # a save under way is no reason to leave this one out
                self._save()
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
        if self.patience.is_over(rule, measured(rule.metric, values)) and self.place.is_main:
            log_line(f"{rule.metric} has not improved for {rule.patience} evaluations: training ends here")

    def _is_best(self, values: Mapping[str, float]) -> bool:
        """Note an evaluation where the best weights are wanted; return whether these are."""
        if self.best is None or not self.best.improves(self.position.step, values):
            return False
        if self.place.is_main:
            emit("best", step=self.position.step, metric=self.best.metric, value=measured(self.best.metric, values))
        return True

    def _evaluate(self, split: str, step: int | None = None, *, with_classes: bool = False) -> Measured:
        """Measure a split and tell of it; `step` is that of the weights where it is not the present one."""
        self.checkpoints.poll()
        self.clock.mark(Phase.OTHER)
        found = self.evaluations.measure(split, with_classes=with_classes)
        if self.place.is_main:
            at = self.position.step if step is None else step
            emit("evaluation", split=split, step=at, epoch=self.position.epoch, samples=found.samples, **found.means)
            if self.board is not None:
                self.board.evaluation(split, at, found.means)
        return found

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Measure the weights that the run ends with, the best where they are wanted, and write the model folder."""
        final: dict[str, Mapping[str, float]] = {}
        by_class = self._classified_split()
        found: Measured | None = None
        step = self.position.step
        validation_loss = 0.0
        if "validation" in self.datasets:
            found = self._evaluate("validation", with_classes=by_class == "validation")
            final["validation"] = found.means
            validation_loss = found.means.get("loss", 0.0)
            self._is_best(found.means)
            mark = self._load_best()
            if mark is not None:
                step, final["validation"] = mark.step, mark.values
                if by_class == "validation":
                    found = self.evaluations.measure("validation", with_classes=True)
        if "test" in self.datasets:
            found = self._evaluate("test", step, with_classes=by_class == "test")
            final["test"] = found.means
        part = self._nonfinite_part(at_end=True) or ("" if math.isfinite(validation_loss) else "validation loss is")
        if part and not self.train.export_nonfinite:
            refuse_export(part, self.position.step, self.checkpoints.last_step)
        if part and self.place.is_main:
            log_line(f"warning: the {part} not finite; the model is exported because train.export_nonfinite is true")
        analysis = None
        if by_class is not None and found is not None:
            analysis = Analysis(found.confusion, self.task.classes, split=by_class, step=step, metrics=final)
        with heartbeat.exempt():  # as long as the disk takes
            self._export({"step": step, **final}, analysis)

    def _classified_split(self) -> str | None:
        """Return the split that is analysed by class, if any."""
        if not self.evaluations.can_predict:
            return None
        return next((split for split in ("test", "validation") if split in self.datasets), None)

    def _load_best(self) -> Mark | None:
        """Load the best weights into the model; return their mark, or None where the present ones are to be taken."""
        marks = self.best.marks if self.best is not None else []
        for mark in reversed(marks):
            if mark.step == self.position.step and not mark.place:
                return None
            if self.checkpoints.load_weights(mark.step, self.model, mark.place):
                return mark
            if self.place.is_main:
                log_line(f"warning: the best weights, of step {mark.step}, are in no checkpoint any more")
        return None

    # ------------------------------------------------------------ saving

    def _save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint of this step, with `wait` until it is complete."""
        step = self.position.step
        self.checkpoints.poll()
        if self.saved_step == step and (not wait or self.checkpoints.is_complete(step)):
            return
        self.clock.mark(Phase.CHECKPOINT)
        if not self._is_worth_keeping():
            return
        self.mesh.share_buffers(self.model)
        state = {
            "data": self.feeder.state().to_json(),
            "patience": asdict(self.patience),
            "evaluated_step": self.evaluated_step,
            "pipeline": self.pipeline.sizes if self.pipeline is not None else None,
            BEST_STATE: self.best.to_json() if self.best is not None else None,
            "nonfinite": self.guard.state_dict() if self.guard is not None else None,
        }
        if self.checkpoints.save(self.position.step, self.model, [self.optimizer], state, self._objects(), wait=wait):
            self.saved_step = self.position.step

    def _objects(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer that is no JSON."""
        return {
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
        }

    def _is_worth_keeping(self) -> bool:
        """Return whether loss and weights are finite. If not, they must not replace those of the steps before."""
        part = self._nonfinite_part()
        if part and self.place.is_main and not self.is_lost:
            log_line(
                f"no checkpoint at step {self.position.step}: its {part} not finite; the next is due when it is again"
            )
        self.is_lost = bool(part)
        return not part

    def _nonfinite_part(self, *, at_end: bool = False) -> str:
        """Return `training loss is` or `weights are` where these are not finite, else an empty text.

        A step that was left out does not count, unless all were.
        """
        loss = self.last_loss
        if self.guard is not None:
            self.guard.settle()
            loss = self.guard.last_loss
            if at_end and 0 < self.position.step <= self.guard.skipped:
                return "training loss is"
        elif self.scaler.is_enabled() and not at_end:
            loss = None  # the loss scale has left out the step
        if loss is not None and not math.isfinite(float(self.mesh.mean(loss))):
            return "training loss is"
        is_finite = are_weights_finite(self.parameters, self.place, self.checkpoints.group)
        return "" if is_finite else "weights are"

    def _resume(self) -> str | None:
        """Load the checkpoint to start from; return its uri, or None for a new run."""
        check_serializable(self._objects())
        found = self.checkpoints.resume(self.model, [self.optimizer])
        if found.uri is None:
            return None
        objects = found.objects
        if not found.has_random:  # more ranks than saved it: this one's go on from nobody's
            seed_everything(self.own_seed + 1_000_003 * found.step)
        try:
            notes = self._take_state(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the state in {found.uri}/manifest.json is not what a Task saves ({why})") from None
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(objects["scaler"])
        if self.schedule is not None and objects["schedule"] is not None:
            self.schedule.load_state_dict(objects["schedule"])
        self.place.progress.step = self.position.step
        if found.is_own:
            self.saved_step = self.position.step
        if self.place.is_main and self._is_at_end():
            log_line(f"nothing is left to train: {found.uri} is at the end already")
        for note in notes if self.place.is_main else ():
            log_line(note)
        return found.uri

    def _take_state(self, found: Resumed) -> list[str]:
        """Take the position in the data and the state of early stopping; return what people should know of it."""
        state = found.state
        data, patience = DataState.from_json(state["data"]), Patience(**state["patience"])
        self.evaluated_step = int(state["evaluated_step"])
        if self.best is not None:
            self.best.resume(state, "" if found.is_own else str(found.uri).rpartition("/")[0])
        if self.guard is not None and state.get("nonfinite") is not None:
            self.guard.load_state_dict(state["nonfinite"])
        self.patience = patience
        return self.feeder.resume(data)

    def _export(self, final: Mapping[str, Any], analysis: Analysis | None) -> None:
        """Write the model folder: model.pt, metrics.json and the analysis."""
        weights = whole_weights(self.model, self.mesh)
        if not self.place.is_main:
            return
        folder = self.place.model_dir
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, folder / "model.pt")
        (folder / "metrics.json").write_text(dump_json(final, indent=1) + "\n", encoding="utf-8")
        if analysis is not None:
            log_line(f"analysis of the {analysis.split} split, class by class: {analysis.write(folder)}")
