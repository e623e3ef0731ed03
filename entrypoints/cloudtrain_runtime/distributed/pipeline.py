"""Pipeline parallelism: a model's layers in stages on different ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.data import Feeder, Loading, ReaderShare, make_feeder
from cloudtrain_runtime.distributed.ddp_buckets import average_gradients
from cloudtrain_runtime.distributed.fsdp import autocast
from cloudtrain_runtime.distributed.layer_chain import (
    ChainProfile,
    TensorShape,
    balance_stages,
    chain_of,
    drop_other_stages,
    profile_chain,
    split_chain,
)
from cloudtrain_runtime.distributed.loss_weights import LossWeights
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.model_proxy import (
    ModelInputs,
    OutputProxy,
    capture_model_inputs,
)
from cloudtrain_runtime.distributed.uneven_inputs import replace_nonfinite
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.metrics.predictions import Prediction, checked_prediction
from cloudtrain_runtime.process.event_log import emit
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.seeds import IsolatedRandomState
from cloudtrain_runtime.task import Batch, Task, checked_loss, checked_metrics, collate_function

_MAX_PENDING_SENDS = 4
"""Evaluation batches that a stage may have sent without the next one having received them."""


@dataclass(frozen=True)
class BatchEvaluation:
    """Loss, metrics and prediction of an evaluation batch."""

    values: Mapping[
        str, torch.Tensor
    ]  # the loss, a mean or a sum, and metrics with a value per sample
    prediction: Prediction | None  # if requested
    count: torch.Tensor | None = None  # what the loss is a sum of; None where it is a mean


class Pipeline:
    """This rank's stages, and the schedule that runs micro-batches through all stages.

    Args:
        model: The full model; parameters of other ranks are removed from it.
        placed: Shards or replicates a stage on its ranks.
        scale: Scales a loss before its backward pass.
        sizes: Number of links in each stage of the resumed run; measured again if they do not fit.

    Attributes:
        sizes: Number of links in each stage.
        parts: This rank's stages, without DDP wrappers.

    Raises:
        JobError: the schedule does not fit the number of micro-batches.
        TaskError: the model cannot be split.
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
        from cloudtrain_runtime.distributed.pipeline_stages import LOOPED, PipelineStep, StageSpec

        _check(train, mesh)
        self._task, self._train, self._mesh, self._scale = task, train, mesh, scale
        own_stages = 2 if train.parallel.schedule in LOOPED else 1
        stages = own_stages * mesh.pipeline
        links = chain_of(task, model, stages)
        seen = self._profile(links, dataset)
        self._call = seen.call
        fits = sizes is not None and len(sizes) == stages and sum(sizes) == len(links)
        # Measured times differ between starts; another split would change the random numbers of each layer.
        costs = seen.work if train.deterministic else seen.seconds
        self.sizes = list(sizes or ()) if fits else balance_stages(costs, stages)
        parts = split_chain(links, self.sizes, model)
        if mesh.context.is_main:
            _emit_stages(self.sizes, seen.seconds)
        indices = [mesh.stage + turn * mesh.pipeline for turn in range(own_stages)]
        own = [parts[index] for index in indices]
        drop_other_stages(model, own, [part for part in parts if part not in own])
        if next(model.parameters(), None) is None:
            raise TaskError(
                f"train.parallel.pipeline: stage {mesh.stage} of the chain has no parameters"
            )
        passed = [
            _sent_shapes(seen.passed[sum(self.sizes[: stage + 1]) - 1], train, mesh)
            for stage in range(stages)
        ]
        group = mesh.group("pipeline")
        self._links = [
            StageSpec(
                index,
                stages,
                passed[index - 1],
                passed[index],
                mesh.context.device,
                group,
                self._precision,
            )
            for index in indices
        ]
        replicas = [placed(part) for part in own]
        inner = [
            replica.module if isinstance(replica, DistributedDataParallel) else replica
            for replica in replicas
        ]
        self.parts: list[nn.Module] = inner
        # This schedule computes gradients of weights separately, without the hooks that DDP relies on.
        is_late = train.parallel.schedule == "zero_bubble"
        self._late = [
            replica
            for replica in replicas
            if is_late and isinstance(replica, DistributedDataParallel)
        ]
        self._modules = inner if is_late else replicas
        # Modules that the Task made for its chain are not in the model, so model.train() does not reach them.
        known = set(model.modules())
        self._extra_modules = [
            module for part in own for module in part.modules() if module not in known
        ]
        self._schedules: dict[int, Callable[[], None]] = {}
        self._step = PipelineStep()
        self._batches: list[Batch] = []
        self._weights = LossWeights((), 1, 1)
        self._total = torch.zeros((), device=mesh.context.device)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def run(self, batches: Iterable[Batch], weights: LossWeights) -> torch.Tensor:
        """Run the forward and backward passes of micro-batches.

        Args:
            batches: This rank's micro-batches, on its device; the same on all ranks of a pipeline.
            weights: Factors of the losses; receives their counts.

        Returns:
            The weighted sum of the losses, a scalar; 0 on all stages but the last.

        Raises:
            TaskError: a micro-batch does not have the expected shape.
        """
        self._set_mode(training=True)
        self._weights = weights
        self._batches = [
            batch if count else replace_nonfinite(batch)
            for batch, count in zip(batches, weights.counts, strict=True)
        ]
        self._step.calls = [
            capture_model_inputs(self._task, batch, training=True) for batch in self._batches
        ]
        self._step.samples = [self._samples(call) for call in self._step.calls]
        self._total = torch.zeros((), device=self._mesh.context.device)
        try:
            self._schedule(len(weights.counts))()
        except RuntimeError as error:  # torch's error contains all values
            if isinstance(error.__cause__, TaskError):
                raise error.__cause__ from None
            raise
        for replica in self._late:
            average_gradients(replica)
        self._batches, self._step.calls = [], []
        return self._total

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, samples: int, *, with_classes: bool = False
    ) -> BatchEvaluation:
        """Return loss and metrics of a batch on the last stage, and no values on the others.

        Every rank of the pipeline calls this with the same batch. A stage continues with the next batch while the
        following stages compute.
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
                    loss = checked_loss(self._task, OutputProxy(returned).eval(), batch)
                    metrics = checked_metrics(
                        self._task, OutputProxy(returned, call, "metrics").eval(), batch, samples
                    )
                    prediction = None
                    if with_classes:
                        proxy = OutputProxy(returned, call, "predict").eval()
                        prediction = checked_prediction(self._task, proxy, batch, samples)
                    return BatchEvaluation({"loss": loss.value, **metrics}, prediction, loss.count)
            self._send(returned, link, size)
        return BatchEvaluation({}, None)

    def _schedule(self, micro_steps: int) -> Callable[[], None]:
        from cloudtrain_runtime.distributed.pipeline_stages import make_schedule

        if micro_steps not in self._schedules:
            stages = list(zip(self._modules, self._links, strict=True))
            name = self._train.parallel.schedule
            self._schedules[micro_steps] = make_schedule(
                name, stages, self._step, micro_steps, self._loss
            )
        return self._schedules[micro_steps]

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        micro_step = int(number)  # on the CPU
        with self._precision():
            loss = self._weights.weigh(
                checked_loss(self._task, OutputProxy(output), self._batches[micro_step]), micro_step
            )
        if self._weights.counts[micro_step]:
            self._total += loss.detach()
        return self._scale(loss)

    def _samples(self, call: ModelInputs) -> int:
        samples = min(
            (shape.samples_of(value) for shape, value in zip(self._call, call, strict=False)),
            default=0,
        )
        expected = [list(shape.at(samples)) for shape in self._call]
        found = [list(value.shape) for value in call]
        if found != expected:
            raise TaskError(
                f"train.parallel.pipeline: loss() calls the model with {found} and called it with {expected}: "
                "micro-batches may differ in their number of samples only, so pad them to one length in collate()"
            )
        return samples

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        # A sharded model sets its own precision and returns fp32.
        return autocast(
            "fp32" if self._mesh.is_sharded else self._train.precision, self._mesh.context.device
        )

    def _set_mode(self, *, training: bool) -> None:
        for module in self._extra_modules:
            module.training = training

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
            self._sent.append(
                (dist.isend(settled, dst=self._rank_of(link.index + 1), group=link.group), settled)
            )
        while len(self._sent) > _MAX_PENDING_SENDS * len(link.returns):
            self._sent.pop(0)[0].wait()

    def _rank_of(self, stage: int) -> int:
        mesh = self._mesh
        each = mesh.context.world_size // mesh.pipeline
        return mesh.context.rank % each + stage % mesh.pipeline * each

    def _profile(self, links: Sequence[nn.Module], dataset: Dataset[Any]) -> ChainProfile:
        """Measure the chain on the first data rank of stage 0; return the result on all ranks."""
        seen: ChainProfile | None = None
        problem: str | None = None
        if self._mesh.stage == 0 and self._mesh.data_rank == 0:
            try:
                call, smaller = self._first_calls(dataset)
                device = self._mesh.context.device
                seen = profile_chain(
                    links, call, smaller, device, partial(autocast, self._train.precision, device)
                )
            except TaskError as error:
                problem = str(error)
        seen, problem = gather((seen, problem), self._mesh.context)[0]
        if seen is None:
            raise TaskError(problem or "")
        return seen

    def _first_calls(self, dataset: Dataset[Any]) -> tuple[ModelInputs, ModelInputs]:
        """Return the model's inputs for a micro-batch, and for one with a sample less."""
        most = self._train.batch_size
        feeder = self._feeder(dataset, most)
        most = min(most, feeder.length or most)
        feeders = (feeder, self._feeder(dataset, max(most - 1, 1)))
        with IsolatedRandomState(self._train.seed):
            batches = [next(next(feeder.epoch()).batches) for feeder in feeders]
        call, smaller = (
            capture_model_inputs(self._task, batch, training=True) for batch in batches
        )
        return call, smaller

    def _feeder(self, dataset: Dataset[Any], batch_size: int) -> Feeder:
        # Only these ranks run this, so it must not communicate; rank 1 logs no messages.
        context = replace(self._mesh.context, rank=1, world_size=1)
        loading = Loading(
            collate_function(self._task), batch_size, seed=self._train.seed, workers=0
        )
        return make_feeder(dataset, context, ReaderShare(0, 1), loading)


def _check(train: TrainConfig, mesh: Mesh) -> None:
    """Reject settings that a pipeline does not support."""
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
    for name in ("static_graph", "find_unused"):
        if getattr(train.parallel, name):
            raise JobError(f"train.parallel.{name}: it does not work with a pipeline")


def _sent_shapes(
    shapes: Sequence[TensorShape], train: TrainConfig, mesh: Mesh
) -> tuple[TensorShape, ...]:
    """Return the shapes of a stage's outputs, with the types in which they are sent."""
    if not mesh.is_sharded or train.precision == "fp32":
        return tuple(shapes)
    return tuple(
        replace(shape, dtype=torch.float32) if shape.dtype.is_floating_point else shape
        for shape in shapes
    )


def _emit_stages(sizes: Sequence[int], seconds: Sequence[float]) -> None:
    ends = list(itertools.accumulate(sizes))
    stages = [sum(seconds[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    # All ranks wait for the slowest stage; 1 is a perfect balance.
    imbalance = max(stages) / (sum(stages) / len(stages))
    emit(
        "pipeline",
        links=list(sizes),
        stage_seconds=[float(f"{stage:.3g}") for stage in stages],
        imbalance=imbalance,
    )
