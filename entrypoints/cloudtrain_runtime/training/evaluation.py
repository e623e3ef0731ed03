"""Evaluation of a split: exact means over all ranks, with each sample counted once."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from cloudtrain_runtime.checkpoint.training_state import random_states, set_random_states
from cloudtrain_runtime.data import Loading, make_evaluation_data
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import DistributedModel
from cloudtrain_runtime.distributed.pipeline import BatchEvaluation
from cloudtrain_runtime.metrics.predictions import checked_prediction
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.seeds import seed_everything
from cloudtrain_runtime.task import (
    Task,
    checked_evaluation,
    checked_loss,
    checked_metrics,
    overrides,
)

OnBatch = Callable[[BatchEvaluation, int], None]
"""Called with the evaluation of a batch, and its number of samples."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an evaluation, the same on all ranks."""

    # number of samples
    samples: int
    # loss and the Task's metrics, as means over all samples
    means: dict[str, float]
    # number of samples by true and predicted class; empty unless requested
    confusion: Counter[tuple[int, int]]


class Evaluator:
    """Evaluates a model on its splits, on all ranks together. It leaves the state of training unchanged.

    Args:
        autocast: Context manager of a forward pass; entered for each batch.
    """

    def __init__(
        self,
        task: Task,
        datasets: Mapping[str, Dataset[Any]],
        seed: int,
        mesh: Mesh,
        built: DistributedModel,
        autocast: AbstractContextManager[Any],
        loading: Loading,
    ) -> None:
        self._task = task
        self._seed = seed
        self._mesh = mesh
        # The plain model, not its DDP replica: ranks may have different numbers of batches, so its
        # forward pass must not communicate with other ranks.
        self._model = built.model
        self._pipeline = built.pipeline
        self._autocast = autocast
        # A forward pass that communicates must run equally often on all ranks.
        even = not mesh.is_plain
        self._make = {
            split: partial(
                make_evaluation_data, dataset, mesh.context, mesh.data_share, loading, even=even
            )
            for split, dataset in datasets.items()
        }
        self._batches = {split: make() for split, make in self._make.items() if split != "train"}

    @torch.no_grad()
    def evaluate(
        self, split: str, *, with_classes: bool = False, on_batch: OnBatch | None = None
    ) -> EvaluationResult:
        """Return the mean metrics of a split.

        The host waits for the device only after the last batch.

        Args:
            split: The split.
            with_classes: Whether to call the Task's `predict`.
            on_batch: Called with each batch that this rank counts, and its number of samples.
        """
        sums: dict[str, torch.Tensor] = {}
        counted: torch.Tensor | float = 0.0
        pairs: list[torch.Tensor] = []
        # The training split is read anew each time: it is not kept for evaluations.
        batches = self._batches[split] if split in self._batches else self._make[split]()
        stages = self._pipeline.parts if self._pipeline is not None else ()
        self._mesh.share_buffers(self._model)
        with _unchanged(self._mesh, self._model, *stages):
            # The same random numbers in each evaluation.
            seed_everything(self._seed + 1 + self._mesh.data_rank)
            self._model.eval()
            for micro, batch in batches:
                heartbeat.refresh()
                result = self._forward(batch, micro.samples, with_classes=with_classes)
                own = result.prediction
                prediction = None if own is None else own.map(_full_tensor)
                if micro.count == 0 or self._mesh.tensor_rank != 0:
                    # A placeholder batch, or one that another rank counts.
                    continue
                for name, value in result.values.items():
                    is_mean = name == "loss" and result.count is None
                    weight = micro.count if is_mean else 1
                    sums[name] = sums.get(name, 0.0) + value.double().sum() * weight
                if "loss" in result.values:
                    counted = counted + (micro.count if result.count is None else result.count)
                if prediction is not None and prediction.is_class:
                    pairs.append(torch.stack([prediction.predicted, prediction.true]))
                if on_batch is not None:
                    on_batch(replace(result, prediction=prediction), micro.count)
        # All values come to the host in one transfer.
        on_host = torch.stack(list(sums.values())).tolist() if sums else []
        means: dict[str, float] = {}
        confusion = Counter[tuple[int, int]]()
        totals = dict(zip(sums, on_host, strict=True))
        shares = gather((totals, float(counted), _count_pairs(pairs)), self._mesh.context)
        # The loss is a mean over the samples, or over the Task's own count.
        losses = sum(count for _, count, _ in shares)
        for share, _, counts in shares:
            confusion += counts
            for name, value in share.items():
                number = losses if name == "loss" else batches.samples
                means[name] = means.get(name, 0.0) + (value / number if number else math.nan)
        if overrides(self._task, "after_evaluation"):
            own_means = checked_evaluation(self._task, split, dict(means))
            # Rank 0's values count for all ranks.
            means |= gather(own_means, self._mesh.context)[0]
        return EvaluationResult(samples=batches.samples, means=means, confusion=confusion)

    def _forward(self, batch: Any, samples: int, *, with_classes: bool) -> BatchEvaluation:
        if self._pipeline is not None:
            return self._pipeline.evaluate(batch, samples, with_classes=with_classes)
        with self._autocast:
            loss = checked_loss(self._task, self._model, batch)
            values = {
                "loss": loss.value,
                **checked_metrics(self._task, self._model, batch, samples),
            }
            prediction = None
            if with_classes:
                prediction = checked_prediction(self._task, self._model, batch, samples)
        full = {name: _full_tensor(value) for name, value in values.items()}
        count = None if loss.count is None else _full_tensor(loss.count)
        return BatchEvaluation(full, prediction, count)


@contextlib.contextmanager
def _unchanged(mesh: Mesh, *models: nn.Module) -> Iterator[None]:
    """Restore random states and each module's training mode, and reshard what a forward pass alone left gathered."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    states = random_states(mesh.context)
    try:
        yield
    finally:
        set_random_states(states, mesh.context)
        for module, mode in modes:
            module.training = mode
            # Only a sharded module has this method.
            if hasattr(module, "set_requires_gradient_sync"):
                module.reshard()  # type: ignore[operator]


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _count_pairs(pairs: Sequence[torch.Tensor]) -> Counter[tuple[int, int]]:
    """Count samples by true and predicted class, from pairs (predicted, true) of shape [2, samples]."""
    if not pairs:
        return Counter()
    all_pairs: Any = torch.cat(list(pairs), dim=1).cpu()
    kinds, counts = all_pairs.unique(dim=1, return_counts=True)
    return Counter(
        {
            (true, guess): n
            for (guess, true), n in zip(kinds.T.tolist(), counts.tolist(), strict=True)
        }
    )
