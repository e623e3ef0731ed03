"""Training loop of a Task: set-up, epochs, evaluation, checkpoints and the end of the run."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from cloudtrain_runtime.checkpoint.initial_weights import load_initial_weights
from cloudtrain_runtime.checkpoint.manager import CheckpointManager, Resumed
from cloudtrain_runtime.checkpoint.optimizer_options import SETTINGS
from cloudtrain_runtime.checkpoint.safe_metadata import check_serializable
from cloudtrain_runtime.contract import LOG_EVERY_VARIABLE, CheckpointConfig, TrainConfig
from cloudtrain_runtime.contract.manifest import BEST_STATE
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.data import DataState, Loading, Position, Step, make_feeder
from cloudtrain_runtime.distributed.fsdp import autocast
from cloudtrain_runtime.distributed.gradients import disable_foreach_across_meshes, make_scaler
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import (
    DistributedModel,
    distribute_model,
    gather_weights,
)
from cloudtrain_runtime.distributed.replica_check import ReplicaCheck
from cloudtrain_runtime.errors import CheckpointError, JobError
from cloudtrain_runtime.metrics.meter import Meter
from cloudtrain_runtime.metrics.profiler import StepProfiler
from cloudtrain_runtime.metrics.step_timer import Phase
from cloudtrain_runtime.metrics.stragglers import NUMBERS_PER_RANK
from cloudtrain_runtime.metrics.tracking.tensorboard import TensorBoardWriter
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import Row
from cloudtrain_runtime.process.rehearsal import Rehearsal
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.seeds import seed_everything
from cloudtrain_runtime.task import (
    Task,
    checked_datasets,
    checked_optimizers,
    checked_sampler,
    collate_function,
    overrides,
)
from cloudtrain_runtime.training import determinism
from cloudtrain_runtime.training.best_checkpoint import (
    BestTracker,
    EarlyStoppingState,
    Improvement,
    metric_value,
)
from cloudtrain_runtime.training.classification import ClassificationAnalysis
from cloudtrain_runtime.training.evaluation import EvaluationResult, Evaluator
from cloudtrain_runtime.training.nonfinite import (
    LossMonitor,
    NonfiniteGuard,
    are_weights_finite,
    fail_nonfinite_export,
)
from cloudtrain_runtime.training.optimizer_step import OptimizerStep, StepParts
from cloudtrain_runtime.training.resumed_settings import InitialSettings
from cloudtrain_runtime.training.schedules import advance_plateaus, make_schedule, step_metrics
from cloudtrain_runtime.training.single_samples import warning_of_single_samples
from cloudtrain_runtime.training.training_step import TrainingStep

_LOG_EVERY_STEPS = 10


class Trainer:
    """Trains one Task on one rank."""

    def __init__(
        self, task: Task, train: TrainConfig, checkpoint: CheckpointConfig, context: Context
    ) -> None:
        self.task = task
        self.train = train
        self.context = context
        if train.deterministic:
            determinism.require_deterministic_algorithms()
        self.datasets = checked_datasets(task)
        self.best = BestTracker.of(train, self.datasets)
        self.mesh = Mesh.of(train.parallel, context)
        self.scaler = make_scaler(context.device, self.mesh, enabled=train.precision == "fp16")
        self.checkpoints = CheckpointManager(
            checkpoint, context, mesh=self.mesh.sizes, numbers=1 + NUMBERS_PER_RANK
        )
        built = self._build_model()
        self.model = built.model
        self.pipeline = built.pipeline
        # What model() has made trainable.
        self.trainable = self._read_trainable()
        self.replicas = ReplicaCheck(self.model, self.mesh)
        # A sharded model sets its own precision and returns fp32.
        outer_precision = "fp32" if self.mesh.is_sharded else train.precision
        precision = autocast(outer_precision, context.device)
        self.optimizers = checked_optimizers(task, self.model)
        self.optimizer = next(iter(self.optimizers.values()))
        self.settings = InitialSettings(self.optimizers, train)
        disable_foreach_across_meshes(self.optimizer)
        self.guard = self._make_guard()
        self.loss_monitor = LossMonitor()
        loading = Loading(
            collate=collate_function(task),
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            seed=train.seed,
            drop_last=train.drop_last,
            workers=train.workers,
            sampler=checked_sampler(task, self.datasets["train"]),
        )
        self.evaluator = Evaluator(
            task=task,
            datasets=self.datasets,
            seed=train.seed,
            mesh=self.mesh,
            built=built,
            autocast=precision,
            loading=loading,
        )
        self.feeder = make_feeder(self.datasets["train"], context, self.mesh.data_share, loading)
        self.last_step = self.total_steps
        self.schedules = {
            name: make_schedule(task, each, train, self.datasets, lambda: self.last_step)
            for name, each in self.optimizers.items()
        }
        self.settings.add_schedules(self.schedules)
        self.has_after_step = overrides(task, "after_step")
        self.early_stopping = EarlyStoppingState()
        self.log_every = int(os.environ.get(LOG_EVERY_VARIABLE, _LOG_EVERY_STEPS))
        self.meter = Meter(
            task=task,
            shape=built.shape,
            precision=train.precision,
            context=context,
            stage=self.mesh.stage,
        )
        self.clock = self.meter.clock
        self.optimizer_step = self._make_step(built, precision)
        self.profiler = StepProfiler(
            context=context, clock=self.clock, at=train.profile_at, steps=train.profile_steps
        )
        self.rehearsal = Rehearsal(os.environ, context.rank)
        self.saved_step = -1
        self.evaluated_step = -1
        self.last_loss: torch.Tensor | None = None
        self.is_loss_nonfinite = False
        # Dropout and augmentation differ between ranks, except between those that compute the same
        # layers.
        self.own_seed = train.seed + 1 + self.mesh.data_rank + 1_009 * self.mesh.stage
        seed_everything(self.own_seed)

    def _build_model(self) -> DistributedModel:
        """Build the model with its initial weights on all ranks. All ranks call this together."""
        stages = None
        if self.mesh.pipeline > 1:
            # A resumed run keeps its pipeline stages: with other stages it would sum in another
            # order.
            stages = self.checkpoints.peek_state().get("pipeline")
        source = self.train.init_from
        initialize = None
        # A resumed run loads its own weights.
        if source is not None and not self.checkpoints.peek_state():
            initialize = partial(load_initial_weights, uri=source, context=self.context)
        # The same seed on all ranks, so that they build the same model.
        seed_everything(self.train.seed)
        return distribute_model(
            task=self.task,
            train=self.train,
            mesh=self.mesh,
            scale=self.scaler.scale,
            dataset=self.datasets["train"],
            stages=stages,
            initialize=initialize,
        )

    def _make_guard(self) -> NonfiniteGuard | None:
        limit = self.train.skip_nonfinite
        if limit is None:
            return None
        return NonfiniteGuard(
            limit=limit, optimizer=self.optimizer, scaler=self.scaler, mesh=self.mesh
        )

    def _make_step(
        self, built: DistributedModel, precision: contextlib.AbstractContextManager[Any]
    ) -> TrainingStep | OptimizerStep:
        parts = StepParts(
            task=self.task,
            train=self.train,
            mesh=self.mesh,
            built=built,
            autocast=precision,
            meter=self.meter,
            optimizers=self.optimizers,
            scaler=self.scaler,
            schedules=self.schedules,
            guard=self.guard,
        )
        if overrides(self.task, "training_step"):
            return TrainingStep(parts)
        return OptimizerStep(parts)

    @determinism.explain_nondeterminism()
    def run(self) -> None:
        """Train from the newest checkpoint until the run ends or receives a notice to stop."""
        resumed = self._resume()
        self.last_step = self.total_steps
        began = time.monotonic()
        first = self.position.step
        if self.context.is_main and self.train.tensorboard:
            TensorBoardWriter(ml_tree(os.environ).tensorboard, first)
        self.emit_started(
            first,
            self.total_steps,
            epoch=self.position.epoch,
            train_samples=self.feeder.length,
            global_batch=self.feeder.global_size,
            mesh={name: size for name, size in self.mesh.sizes.items() if size > 1},
            resumed_from=resumed.uri,
            continues=resumed.run or None,
        )
        with self.checkpoints.notice.handling_signals():
            try:
                is_complete = self._train_epochs()
            except BaseException:
                # The pending log may show the cause. An error while it is collected must not
                # replace the first error.
                with contextlib.suppress(RuntimeError, JobError):
                    self.checkpoints.poll(wait=False)
                self.checkpoints.wait_after_failure()
                raise
        if not is_complete:
            # After the save, which is more urgent.
            self.profiler.close()
            position = self.position
            self.checkpoints.notice.report(
                position.step, is_main=self.context.is_main, epoch=position.epoch
            )
            return
        self._save(wait=True)
        self.profiler.close()
        seconds = time.monotonic() - began
        self.feeder.close()
        self._finish()
        self.checkpoints.require_completed()
        if self.context.is_main:
            self._emit_finished(first, seconds)

    def _emit_finished(self, first: int, seconds: float) -> None:
        """Emit the event of the run's end, after so many seconds of training from step `first` on."""
        samples = (self.position.step - first) * self.feeder.global_size
        rate = samples / seconds if samples else None
        others: dict[str, int] = {"start_step": first} if first else {}
        if self.best is not None and self.best.latest is not None:
            others["best_step"] = self.best.latest.step
        if self.guard is not None:
            others["skipped"] = self.guard.skipped
        emit(
            "finished",
            step=self.position.step,
            epochs=self.position.epoch,
            seconds=seconds,
            samples_per_second=rate,
            **others,
        )

    @property
    def position(self) -> Position:
        """Steps, epochs and samples done."""
        return self.feeder.position

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run from its start, including those before a resume with another batch size.

        None where the data has no known length.
        """
        if self.train.steps is not None:
            return self.train.steps
        length = self.feeder.length
        if length is None:
            return None
        done = self.position.epoch * length + self.position.samples
        left = max((self.train.epochs or 0) * length - done, 0)
        full_epochs, rest = divmod(left, length)
        # The last step of each epoch may have fewer samples, or be left out.
        count = math.floor if self.train.drop_last else math.ceil
        steps_per_epoch = count(length / self.feeder.global_size)
        steps_of_rest = count(rest / self.feeder.global_size)
        return self.position.step + full_epochs * steps_per_epoch + steps_of_rest

    def emit_started(self, step: int, total_steps: int | None, **others: Any) -> None:
        """Emit the event of the run's start. All ranks call this together."""
        parameters = self.mesh.count_parameters(self.model)
        if not self.context.is_main:
            return
        emit(
            "started",
            run=self.context.run,
            step=step,
            total_steps=total_steps,
            world_size=self.context.world_size,
            hosts=len(self.context.hosts),
            device=self.context.device.type,
            backend=self.context.backend,
            parameters=parameters,
            restarts=self.context.restarts,
            torch=torch.__version__,
            **others,
        )

    def _train_epochs(self) -> bool:
        """Train until the end; return False if a notice to stop ended training before it."""
        if self._evaluate_if_due():
            return True
        is_first = True
        notice = self.checkpoints.notice
        while not self._is_at_end():
            self.model.train()
            self.clock.mark(Phase.DATA)
            for step in self.rehearsal.watching(self.feeder.epoch()):
                self.profiler.on_step(self.position.step + 1)
                if is_first:
                    with self._watching_batch_norm(step):
                        row = self._train_step(step)
                else:
                    row = self._train_step(step)
                is_first = False
                number = self.position.step
                self.rehearsal.at_step(number, lambda: notice.is_given)
                due = self.checkpoints.at_boundary(number, row)
                # A run that must stop has no time to evaluate; it evaluates after the resume.
                should_end = not due.stop and self._evaluate_if_due()
                if due.save or due.stop:
                    self._save(wait=due.stop)
                if due.stop or should_end:
                    return should_end
                if self._is_at_end():
                    break
        return True

    def _watching_batch_norm(self, step: Step) -> contextlib.AbstractContextManager[None]:
        """Return the context of the first step: it warns if a later one has a sample that batch norm refuses."""
        is_watched = self.context.is_main and self.mesh.is_plain and not self.train.compile
        length = self.feeder.length
        if not is_watched or length is None or self.feeder.smallest_batch != 1:
            return contextlib.nullcontext()
        left = math.ceil((length - self.position.samples) / self.feeder.global_size)
        if self.train.steps is not None and self.position.step + left > self.train.steps:
            # The run ends before the last step of an epoch.
            return contextlib.nullcontext()
        samples = min(micro.samples for micro in step.plan.micro_batches)
        return warning_of_single_samples(self.model, samples)

    def _is_at_end(self) -> bool:
        step = self.position.step
        if self.train.steps is not None:
            return self.rehearsal.is_over(step) or step >= self.train.steps
        return self.rehearsal.is_over(step) or self.position.epoch >= (self.train.epochs or 0)

    def _train_step(self, step: Step) -> Row | None:
        """Take one optimizer step and advance the position. Return its row for the log, if it is logged."""
        number = self.position.step + 1
        is_logged = number % self.log_every == 0 or number == 1
        self.clock.begin(is_logged=is_logged)
        self.last_loss, grad_norm = self.optimizer_step.run(step, number, is_logged=is_logged)
        self.feeder.advance()
        self.context.progress.step = number
        if self.has_after_step:
            with torch.no_grad():
                self.task.after_step(self.model)
        heartbeat.tick(number)
        self.meter.samples += step.plan.samples
        row = None
        if is_logged or self._is_at_end():
            row = self._log(self.last_loss, grad_norm)
        self.clock.mark(Phase.CHECKPOINT)
        return row

    def _log(self, total: torch.Tensor, grad_norm: torch.Tensor | None) -> Row:
        """Read the metrics since the last logged step; they are logged when the losses of all ranks have arrived."""
        self.clock.mark(Phase.LOG)
        # The conversion waits for the GPU.
        at = self.position
        share = float(total)
        read, numbers = self.meter.read()
        metrics = {**read, "learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if grad_norm is not None:
            metrics["grad_norm"] = float(grad_norm)
        if own := step_metrics(self.optimizer, self.optimizer_step.losses):
            metrics["metrics"] = own

        def on_rows(rows: list[list[float]]) -> None:
            self.meter.compare([row[1:] for row in rows])
            loss = sum(row[0] for row in rows) * self.mesh.weight
            if self.context.is_main:
                emit("step", step=at.step, epoch=at.epoch, loss=loss, **metrics)
            if self.guard is None:
                self.loss_monitor.record(at.step, loss, is_main=self.context.is_main)

        return Row((share, *numbers), on_rows)

    def _evaluate_if_due(self) -> bool:
        """Evaluate if an evaluation is due at this step; return whether early stopping ends training."""
        rule = self.train.early_stopping
        if self._is_evaluation_due():
            values = self._evaluate("validation").means
            self.evaluated_step = self.position.step
            advance_plateaus(self.schedules.values(), rule, values)
            if rule is not None:
                value = metric_value(rule.metric, values)
                has_ended = self.early_stopping.should_stop(rule, value)
                if has_ended and self.context.is_main:
                    log_line(
                        f"{rule.metric} has not improved for {rule.patience} evaluations: training ends here"
                    )
            if self._record_if_best(values):
                # An unfinished save must not prevent this one.
                self.checkpoints.wait_for_save()
                self._save()
        return rule is not None and self.early_stopping.waited >= rule.patience

    def _is_evaluation_due(self) -> bool:
        if "validation" not in self.datasets or self._is_at_end():
            # `_finish` runs the last evaluation.
            return False
        if self.position.step in (0, self.evaluated_step):
            return False
        if self.train.evaluate_every_steps is not None:
            return self.position.step % self.train.evaluate_every_steps == 0
        return self.position.samples == 0

    def _record_if_best(self, values: Mapping[str, float]) -> bool:
        """Return whether an evaluation is the best so far, where the job exports the best weights."""
        if self.best is None or not self.best.record(self.position.step, values):
            return False
        if self.context.is_main:
            emit(
                "best",
                step=self.position.step,
                metric=self.best.metric,
                value=metric_value(self.best.metric, values),
            )
        return True

    def _evaluate(
        self, split: str, step: int | None = None, *, with_classes: bool = False
    ) -> EvaluationResult:
        self.checkpoints.poll()
        self.clock.mark(Phase.OTHER)
        result = self.evaluator.evaluate(split, with_classes=with_classes)
        if self.context.is_main:
            at = self.position.step if step is None else step
            emit(
                "evaluation",
                split=split,
                step=at,
                epoch=self.position.epoch,
                samples=result.samples,
                **result.means,
            )
        return result

    def _finish(self) -> None:
        """Evaluate the weights that the job exports, the last or the best, and write the model folder."""
        final: dict[str, Mapping[str, float]] = {}
        splits = ("test", "validation") if overrides(self.task, "predict") else ()
        classified = [split for split in splits if split in self.datasets]
        classified_split = classified[0] if classified else None
        result: EvaluationResult | None = None
        step = self.position.step
        validation_loss = 0.0
        if "validation" in self.datasets:
            result = self._evaluate("validation", with_classes=classified_split == "validation")
            final["validation"] = result.means
            validation_loss = result.means.get("loss", 0.0)
            self._record_if_best(result.means)
            best = self._load_best()
            if best is not None:
                step = best.step
                final["validation"] = best.values
                if classified_split == "validation":
                    result = self.evaluator.evaluate("validation", with_classes=True)
        if "test" in self.datasets:
            result = self._evaluate("test", step, with_classes=classified_split == "test")
            final["test"] = result.means
        nonfinite = self._nonfinite_part(at_end=True)
        if not nonfinite and not math.isfinite(validation_loss):
            nonfinite = "validation loss is"
        if nonfinite and not self.train.export_nonfinite:
            fail_nonfinite_export(nonfinite, self.position.step, self.checkpoints.last_step)
        if nonfinite and self.context.is_main:
            why = "the model is exported because train.export_nonfinite is true"
            log_line(f"warning: the {nonfinite} not finite; {why}")
        analysis = None
        classes = self.task.classes
        if classified_split is not None and result is not None and result.confusion:
            analysis = ClassificationAnalysis(
                result.confusion, classes, split=classified_split, step=step, metrics=final
            )
        # A slow disk is no hang.
        with heartbeat.exempt():
            self._write_model_folder({"step": step, **final}, analysis)

    def _write_model_folder(
        self, metrics: Mapping[str, Any], analysis: ClassificationAnalysis | None
    ) -> None:
        """Write the weights, the metrics and the analysis. All ranks call this together; rank 0 writes."""
        weights = gather_weights(self.model, self.mesh)
        if not self.context.is_main:
            return
        folder = self.context.model_dir
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, folder / "model.pt")
        (folder / "metrics.json").write_text(dump_json(metrics, indent=1) + "\n", encoding="utf-8")
        if analysis is not None:
            analysis.write(folder)
            emit("analysis", **analysis.to_event())

    def _load_best(self) -> Improvement | None:
        """Load the best weights into the model and return their evaluation; None if the present ones are exported."""
        improvements = self.best.improvements if self.best is not None else []
        for best in reversed(improvements):
            if best.step == self.position.step and not best.place:
                return None
            if self.checkpoints.load_weights(best.step, self.model, best.place):
                return best
            if self.context.is_main:
                log_line(
                    f"warning: the checkpoint with the best weights (step {best.step}) no longer exists"
                )
        return None

    def _save(self, *, wait: bool = False) -> None:
        """Start to save a checkpoint of this step; with `wait` return when it is complete."""
        step = self.position.step
        self.checkpoints.poll()
        if self.saved_step == step and (not wait or self.checkpoints.is_complete(step)):
            return
        self.clock.mark(Phase.CHECKPOINT)
        if not self._is_state_finite():
            if wait:
                # The run may end here, and that save holds its last good state.
                self.checkpoints.wait_for_save()
            return
        self.replicas.require_equal(step, self._wait_for_newest)
        self.mesh.share_buffers(self.model)
        trainable = self._read_trainable()
        changed = {name: each for name, each in trainable.items() if each != self.trainable[name]}
        state = {
            "data": self.feeder.state().to_json(),
            "patience": asdict(self.early_stopping),
            "evaluated_step": self.evaluated_step,
            "pipeline": self.pipeline.sizes if self.pipeline is not None else None,
            BEST_STATE: self.best.to_json() if self.best is not None else None,
            "nonfinite": self.guard.state_dict() if self.guard is not None else None,
            "requires_grad": changed,
        }
        optimizers = self.optimizers.values()
        objects = self._objects()
        if self.checkpoints.save(step, self.model, optimizers, state, objects, wait=wait):
            self.saved_step = step

    def _wait_for_newest(self) -> int | None:
        """Wait for a save in progress; return the step of the newest checkpoint, None without one."""
        self.checkpoints.wait_for_save()
        return self.checkpoints.last_step

    def _read_trainable(self) -> dict[str, bool]:
        """Return whether each parameter of the model is trained, by its name."""
        return {name: each.requires_grad for name, each in self.model.named_parameters()}

    def _set_trainable(self, changed: Mapping[str, bool]) -> None:
        """Let parameters be trained as model() has made them, but for some by name."""
        values = {**self.trainable, **changed}
        for name, each in self.model.named_parameters():
            each.requires_grad_(values[name])

    def _objects(self) -> dict[str, Any]:
        """Return the state in a checkpoint, besides model and optimizer, that JSON cannot represent."""
        states = {name: each and each.state_dict() for name, each in self.schedules.items()}
        return {
            "scaler": self.scaler.state_dict(),
            "schedule": states.get("", states),
            SETTINGS: self.settings.record(self.last_step).to_plain(),
        }

    def _is_state_finite(self) -> bool:
        """Return whether loss and weights are finite; if not, they must not replace an earlier checkpoint."""
        nonfinite = self._nonfinite_part()
        if nonfinite and self.context.is_main and not self.is_loss_nonfinite:
            log_line(
                f"no checkpoint at step {self.position.step}: its {nonfinite} not finite; "
                "checkpoints are saved again when both are finite"
            )
        self.is_loss_nonfinite = bool(nonfinite)
        return not nonfinite

    def _nonfinite_part(self, *, at_end: bool = False) -> str:
        """Return `training loss is` or `weights are` where these are not finite, else an empty string.

        A skipped step does not count, unless all steps were skipped.
        """
        loss = self.last_loss
        if self.guard is not None:
            self.guard.settle()
            loss = self.guard.last_loss
            if at_end and 0 < self.position.step <= self.guard.skipped:
                return "training loss is"
        elif self.scaler.is_enabled() and not at_end:
            # The loss scale has skipped the step.
            loss = None
        if loss is not None and not math.isfinite(float(self.mesh.mean(loss))):
            return "training loss is"
        is_finite = are_weights_finite(
            self.model.parameters(), self.context, self.checkpoints.group
        )
        return "" if is_finite else "weights are"

    def _resume(self) -> Resumed:
        """Load the checkpoint to start from, if there is one."""
        check_serializable(self._objects())

        def prepare(state: Mapping[str, Any]) -> None:
            # DCP loads the optimizer's state of parameters that are trained only.
            self._set_trainable(dict.fromkeys(state.get("requires_grad", {}), True))

        found = self.checkpoints.resume(self.model, self.optimizers.values(), prepare)
        self._set_trainable(found.state.get("requires_grad", {}))
        if found.uri is None:
            return found
        objects = found.objects
        # The run has more ranks than before, and this rank has no saved random state.
        if not found.has_random:
            seed_everything(self.own_seed + 1_000_003 * found.step)
        try:
            notes = self._restore_state(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"the state in {found.uri}/manifest.json is not what a Task saves ({why})"
            ) from None
        # The state of a run with another precision is empty.
        if self.scaler.is_enabled() and objects["scaler"]:
            self.scaler.load_state_dict(objects["scaler"])
        self.last_step = self.total_steps
        notes += self.settings.resume(
            found, self.context, step=self.position.step, length=self.last_step
        )
        self.context.progress.step = self.position.step
        if found.is_own:
            self.saved_step = self.position.step
        if self.context.is_main and self._is_at_end():
            log_line(f"nothing is left to train: {found.uri} is at the end already")
        if self.context.is_main:
            for note in notes:
                log_line(note)
        return found

    def _restore_state(self, found: Resumed) -> list[str]:
        """Restore the position in the data and the state of early stopping; return notes for the user."""
        state = found.state
        data = DataState.from_json(state["data"])
        early_stopping = EarlyStoppingState(**state["patience"])
        self.evaluated_step = int(state["evaluated_step"])
        if self.best is not None:
            place = "" if found.is_own else str(found.uri).rpartition("/")[0]
            self.best.resume(state, place)
        if self.guard is not None and state.get("nonfinite") is not None:
            self.guard.load_state_dict(state["nonfinite"])
        notes = self.feeder.resume(data)
        if self.settings.has_new_metric(found):
            notes.append("early stopping follows another metric and counts anew")
        else:
            self.early_stopping = early_stopping
        return notes
