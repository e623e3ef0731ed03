"""Pipeline parallelism: a model's layers in stages, on ranks one after the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.data import Feeder, make_feeder
from cloudtrain_runtime.distributed.ddp_buckets import average_gradients
from cloudtrain_runtime.distributed.fsdp import PRECISIONS
from cloudtrain_runtime.distributed.layer_chain import (
    ChainProfile,
    TensorShape,
    balance_stages,
    chain_of,
    drop_other_stages,
    profile_chain,
    split_chain,
)
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.model_proxy import (
    ModelInputs,
    capture_model_inputs,
    loss_from_output,
    metrics_from_output,
    prediction_from_output,
)
from cloudtrain_runtime.distributed.uneven_inputs import replace_nonfinite
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.process.event_log import emit
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.seeds import IsolatedRandomState
from cloudtrain_runtime.task import Batch, Task, collate_function

_SENT_AHEAD = 4
"""Evaluation batches that a stage may be ahead of the next one."""


@dataclass(frozen=True)
class BatchEvaluation:
    """What a batch comes to.

    Attributes:
        values: Loss (the mean) and metrics (a value per sample).
        prediction: Predicted and true classes, where they were asked for.
    """

    values: Mapping[str, torch.Tensor]
    prediction: tuple[torch.Tensor, torch.Tensor] | None


class Pipeline:
    """This rank's stages, and the schedule that brings micro-batches through all of them.

    Args:
        task: The user's.
        model: The whole model; what other ranks hold is taken out of it.
        train: The job's train section.
        mesh: The grid of ranks.
        placed: Puts a stage on its ranks: sharded or replicated.
        scale: What a loss goes through before its backward pass.
        dataset: Samples to measure the model with.
        sizes: Links of each stage, as the run had them before; measured anew where that does not fit.

    Attributes:
        sizes: Links of each stage.
        parts: This rank's stages, as far as hooks on modules reach: of replicas what they replicate.

    Raises:
        JobError: the schedule does not fit the micro-batches.
        TaskError: the model cannot be cut.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        train: TrainConfig,
        mesh: Mesh,
        placed: Callable[[nn.Module], nn.Module],
        scale: Callable[[torch.Tensor], torch.Tensor],
        dataset: Dataset[Any],
        sizes: Sequence[int] | None = None,
    ) -> None:
        from cloudtrain_runtime.distributed.pipeline_stages import (
            PipelineStep,
            StageSpec,
            has_separate_weight_gradients,
            stages_per_rank,
        )

        _check(train, mesh)
        self._task, self._train, self._mesh, self._scale = task, train, mesh, scale
        own_stages = stages_per_rank(train.parallel.schedule)
        stages = own_stages * mesh.pipeline
        links = chain_of(task, model, stages)
        seen = self._survey(links, dataset)
        self._call = seen.call
        fits = sizes is not None and len(sizes) == stages and sum(sizes) == len(links)
        # Times differ from start to start, and with the cut the random numbers of each layer.
        costs = seen.work if train.deterministic else seen.seconds
        self.sizes = list(sizes or ()) if fits else balance_stages(costs, stages)
        parts = split_chain(links, self.sizes, model)
        if mesh.place.is_main:
            _tell(self.sizes, seen.seconds)
        indices = [mesh.stage + turn * mesh.pipeline for turn in range(own_stages)]
        own = [parts[index] for index in indices]
        drop_other_stages(model, own, [part for part in parts if part not in own])
        if next(model.parameters(), None) is None:
            raise TaskError(f"train.parallel.pipeline: stage {mesh.stage} of the chain has no parameters")
        passed = [_on_the_wire(seen.passed[sum(self.sizes[: stage + 1]) - 1], train, mesh) for stage in range(stages)]
        group = mesh.group("pipeline")
        self._links = [
            StageSpec(index, stages, passed[index - 1], passed[index], mesh.place.device, group, self._precision)
            for index in indices
        ]
        replicas = [placed(part) for part in own]
        inner = [replica.module if isinstance(replica, DistributedDataParallel) else replica for replica in replicas]
        self.parts: list[nn.Module] = inner
        is_late = has_separate_weight_gradients(train.parallel.schedule)
        self._late = [replica for replica in replicas if is_late and isinstance(replica, DistributedDataParallel)]
        self._modules = inner if is_late else replicas
        # Links that the Task made for its chain: nobody else tells them whether they are in training.
        known = set(model.modules())
        self._strangers = [module for part in own for module in part.modules() if module not in known]
        self._schedules: dict[int, Callable[[], None]] = {}
        self._step = PipelineStep()
        self._batches: list[Batch] = []
        self._weights: Sequence[float] = ()
        self._total = torch.zeros((), device=mesh.place.device)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def run(self, batches: Iterable[Batch], weights: Sequence[float]) -> torch.Tensor:
        """Bring micro-batches forward and backward.

        Args:
            batches: This rank's micro-batches, on its device; equal on all ranks of a pipeline.
            weights: What the loss of each is multiplied by.

        Returns:
            The weighted sum of the losses, a scalar; 0 but on the last stage.

        Raises:
            TaskError: a micro-batch does not fit through the stages.
        """
        self._set_mode(training=True)
        self._weights = weights
        self._batches = [
            batch if weight else replace_nonfinite(batch) for batch, weight in zip(batches, weights, strict=True)
        ]
        self._step.calls = [capture_model_inputs(self._task, batch, training=True) for batch in self._batches]
        self._step.samples = [self._samples(call) for call in self._step.calls]
        self._total = torch.zeros((), device=self._mesh.place.device)
        self._scale(self._total)  # a loss scale comes to be in its first use, and all ranks must have it
        try:
            self._schedule(len(weights))()
        except RuntimeError as error:  # torch's own, with all values
            if isinstance(error.__cause__, TaskError):
                raise error.__cause__ from None
            raise
        for replica in self._late:
            average_gradients(replica)
        self._batches, self._step.calls = [], []
        return self._total

    @torch.no_grad()
    def evaluate(self, batch: Batch, samples: int, *, with_classes: bool = False) -> BatchEvaluation:
        """Return what a batch comes to on the last stage; nothing on the others.

        Every rank of the pipeline calls it with the same batch. A stage goes on to the next batch while those behind it
        work.

        Args:
            batch: On this rank's device.
            samples: How many it has.
            with_classes: Ask for predictions, too.
        """
        self._set_mode(training=False)
        call = capture_model_inputs(self._task, batch, training=False)
        size = self._samples(call)
        for module, link in zip(self.parts, self._links, strict=True):
            taken = call if link.is_first else self._receive(link, size)
            with self._precision():
                returned = module(*taken)
            if link.is_last:
                with self._precision():
                    loss = loss_from_output(self._task, returned, batch, training=False)
                    values = {"loss": loss, **metrics_from_output(self._task, returned, call, batch, samples)}
                    told = prediction_from_output(self._task, returned, call, batch, samples) if with_classes else None
                    return BatchEvaluation(values, told)
            self._send(returned, link, size)
        return BatchEvaluation({}, None)

    # ------------------------------------------------------------ one step

    def _schedule(self, micro_steps: int) -> Callable[[], None]:
        from cloudtrain_runtime.distributed.pipeline_stages import make_schedule

        if micro_steps not in self._schedules:
            stages = list(zip(self._modules, self._links, strict=True))
            name = self._train.parallel.schedule
            self._schedules[micro_steps] = make_schedule(name, stages, self._step, micro_steps, self._loss)
        return self._schedules[micro_steps]

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Return what the backward pass of a micro-batch starts from."""
        micro_step = int(number)  # on the CPU
        with self._precision():
            loss = (
                loss_from_output(self._task, output, self._batches[micro_step], training=True)
                * self._weights[micro_step]
            )
        if self._weights[micro_step]:
            self._total += loss.detach()
        return self._scale(loss)

    def _samples(self, call: ModelInputs) -> int:
        """Return the samples of a micro-batch."""
        samples = min((shape.samples_of(value) for shape, value in zip(self._call, call, strict=False)), default=0)
        expected = [list(shape.at(samples)) for shape in self._call]
        found = [list(value.shape) for value in call]
        if found != expected:
            raise TaskError(
                f"train.parallel.pipeline: loss() calls the model with {found} and called it with {expected}: "
                "micro-batches may differ in their number of samples only, so pad them to one length in collate()"
            )
        return samples

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        # A sharded model computes in its own precision; what it returns is fp32.
        return self._autocast(None if self._mesh.is_sharded else PRECISIONS.get(self._train.precision))

    def _autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._mesh.place.device.type, dtype=dtype, enabled=dtype is not None)

    def _set_mode(self, *, training: bool) -> None:
        for module in self._strangers:
            module.training = training

    # ------------------------------------------------------------ evaluation

    def _receive(self, link: Any, samples: int) -> ModelInputs:
        source = self._rank_of(link.index - 1)
        values = []
        for shape in link.takes:
            value = torch.empty(shape.at(samples), dtype=shape.dtype, device=link.device)
            dist.recv(value, src=source, group=link.group)
            values.append(value)
        return tuple(values)

    def _send(self, returned: Any, link: Any, samples: int) -> None:
        from cloudtrain_runtime.distributed.pipeline_stages import checked_outputs

        for value, shape in checked_outputs(returned, link, samples):
            settled = value.to(shape.dtype).contiguous()
            self._sent.append((dist.isend(settled, dst=self._rank_of(link.index + 1), group=link.group), settled))
        while len(self._sent) > _SENT_AHEAD * len(link.returns):
            self._sent.pop(0)[0].wait()

    def _rank_of(self, stage: int) -> int:
        """Return the rank of this pipeline that holds a stage."""
        mesh = self._mesh
        each = mesh.place.world_size // mesh.pipeline
        return mesh.place.rank % each + stage % mesh.pipeline * each

    # ------------------------------------------------------------ the first look

    def _survey(self, links: Sequence[nn.Module], dataset: Dataset[Any]) -> ChainProfile:
        """Measure the chain on the ranks of the first stage that rank 0 needs; return on all ranks what it has seen."""
        seen: ChainProfile | None = None
        problem: str | None = None
        dtype = PRECISIONS.get(self._train.precision)
        if self._mesh.stage == 0 and self._mesh.data_rank == 0:
            try:
                call, smaller = self._first_calls(dataset)
                seen = profile_chain(links, call, smaller, self._mesh.place.device, lambda: self._autocast(dtype))
            except TaskError as error:
                problem = str(error)
        seen, problem = gather((seen, problem), self._mesh.place)[0]
        if seen is None:
            raise TaskError(problem or "")
        return seen

    def _first_calls(self, dataset: Dataset[Any]) -> tuple[ModelInputs, ModelInputs]:
        """Return what the model is called with by a micro-batch, and by one with a sample less."""
        most = self._train.batch_size
        feeder = self._feeder(dataset, most)
        most = min(most, feeder.length or most)
        feeders = (feeder, self._feeder(dataset, max(most - 1, 1)))
        with IsolatedRandomState(self._train.seed):
            batches = [next(next(feeder.epoch()).batches) for feeder in feeders]
        call, smaller = (capture_model_inputs(self._task, batch, training=True) for batch in batches)
        return call, smaller

    def _feeder(self, dataset: Dataset[Any], batch_size: int) -> Feeder:
        # Only these ranks look, so nothing may be asked of others; and who trains tells what is to be told.
        place = replace(self._mesh.place, rank=1, world_size=1)
        return make_feeder(
            dataset,
            collate_function(self._task),
            place,
            batch_size=batch_size,
            accumulate=1,
            data_rank=0,
            data_size=1,
            seed=self._train.seed,
            workers=0,
        )


def _check(train: TrainConfig, mesh: Mesh) -> None:
    """Refuse what this pipeline cannot do.

    Raises:
        JobError: the schedule does not fit the micro-batches, or another setting.
    """
    schedule = train.parallel.schedule
    if schedule == "1f1b" and train.accumulate < mesh.pipeline:
        raise JobError(
            f"train.parallel.schedule: 1f1b with {mesh.pipeline} stages needs accumulate {mesh.pipeline} or more, and "
            f"it is {train.accumulate}"
        )
    if schedule in ("interleaved", "zero_bubble") and train.accumulate % mesh.pipeline:
        raise JobError(
            f"train.parallel.schedule: {schedule} needs an accumulate that {mesh.pipeline} divides, and it is "
            f"{train.accumulate}"
        )
    if schedule == "zero_bubble" and train.compile:
        raise JobError("train.parallel.schedule: zero_bubble does not work with train.compile")
    if train.parallel.static_graph:
        raise JobError("train.parallel.static_graph: it does not work with a pipeline")


def _on_the_wire(shapes: Sequence[TensorShape], train: TrainConfig, mesh: Mesh) -> tuple[TensorShape, ...]:
    """Return the shapes of what a stage passes on, as they are sent."""
    if not mesh.is_sharded or train.precision == "fp32":
        return tuple(shapes)
    return tuple(replace(shape, dtype=torch.float32) if shape.dtype.is_floating_point else shape for shape in shapes)


def _tell(sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """Tell which links went into which stage, and what that costs."""
    ends = list(itertools.accumulate(sizes))
    stages = [sum(seconds[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    # Everybody waits for the slowest: 1 would be a perfect balance.
    imbalance = max(stages) / (sum(stages) / len(stages))
    emit("pipeline", links=list(sizes), stage_seconds=[float(f"{stage:.3g}") for stage in stages], imbalance=imbalance)
