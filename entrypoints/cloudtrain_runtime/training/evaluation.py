"""Evaluation of a split: exact means, each sample counted once, however ranks share them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from cloudtrain_runtime.checkpoint.training_state import random_states, set_random_states
from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.data import make_evaluation_data
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import DistributedModel
from cloudtrain_runtime.distributed.pipeline import BatchEvaluation
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.seeds import seed_everything
from cloudtrain_runtime.task import (
    Task,
    checked_loss,
    checked_metrics,
    checked_prediction,
    collate_function,
    is_classifier,
)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation has found, the same on all ranks.

    Attributes:
        samples: How many.
        means: Loss and the Task's metrics: means over all samples.
        confusion: How often which pair of a true and a predicted class was seen, where that was asked for.
    """

    samples: int
    means: dict[str, float]
    confusion: Counter[tuple[int, int]]


class Evaluator:
    """Measures a model on its splits, all ranks together. Training goes on after it as if it had not been.

    Args:
        task: The user's.
        datasets: Its splits.
        train: The job's train section.
        mesh: The grid of ranks.
        built: The model on it.
        autocast: The block that a forward pass runs in; it is entered again and again.
    """

    def __init__(
        self,
        task: Task,
        datasets: Mapping[str, Dataset[Any]],
        train: TrainConfig,
        mesh: Mesh,
        built: DistributedModel,
        autocast: AbstractContextManager[Any],
    ) -> None:
        self._task, self._seed, self._mesh = task, train.seed, mesh
        # The plain model, not its replica: ranks with the whole model may have different numbers of batches, so its
        # forward pass must not talk to others.
        self._model, self._pipeline = built.model, built.pipeline
        self._autocast = autocast
        self._batches = {
            split: make_evaluation_data(
                dataset,
                collate_function(task),
                mesh.place,
                batch_size=train.batch_size,
                data_rank=mesh.data_rank,
                data_size=mesh.data_size,
                # Where a forward pass talks to other ranks, all make equally many.
                even=not mesh.is_plain,
                workers=train.workers,
            )
            for split, dataset in datasets.items()
            if split != "train"
        }

    @property
    def can_predict(self) -> bool:
        """Whether the Task tells classes."""
        return is_classifier(self._task)

    @torch.no_grad()
    def measure(self, split: str, *, with_classes: bool = False) -> EvaluationResult:
        """Return the means over a split.

        Nothing waits for the device before the last batch.

        Args:
            split: Its name.
            with_classes: Ask the Task for predictions, too.
        """
        sums: dict[str, torch.Tensor] = {}
        pairs: list[torch.Tensor] = []
        batches = self._batches[split]
        stages = self._pipeline.parts if self._pipeline is not None else ()
        self._mesh.share_buffers(self._model)
        with (
            _left_as_it_was(self._model, *stages),
            _own_random_numbers(self._seed + 1 + self._mesh.data_rank, self._mesh),
        ):
            self._model.eval()
            for micro, batch in batches:
                heartbeat.refresh()
                found = self._forward(batch, micro.samples, with_classes=with_classes)
                classes = None if found.prediction is None else torch.stack([*map(_whole, found.prediction)])
                if micro.count == 0 or self._mesh.tensor_rank != 0:
                    continue  # a stand-in, or what another rank counts
                for name, value in found.values.items():
                    sums[name] = sums.get(name, 0.0) + value.double().sum() * (micro.count if name == "loss" else 1)
                if classes is not None:
                    pairs.append(classes)
        shares = gather((_numbers(sums), _counted(pairs)), self._mesh.place)
        means = _means([share for share, _ in shares], batches.samples)
        return EvaluationResult(batches.samples, means, sum((counts for _, counts in shares), Counter()))

    def _forward(self, batch: Any, samples: int, *, with_classes: bool) -> BatchEvaluation:
        if self._pipeline is not None:
            return self._pipeline.evaluate(batch, samples, with_classes=with_classes)
        with self._autocast:
            loss = checked_loss(self._task, self._model, batch)
            values = {"loss": loss, **checked_metrics(self._task, self._model, batch, samples)}
            told = checked_prediction(self._task, self._model, batch, samples) if with_classes else None
        return BatchEvaluation({name: _whole(value) for name, value in values.items()}, told)


@contextlib.contextmanager
def _left_as_it_was(*models: nn.Module) -> Iterator[None]:
    """Put back which modules train, and what a forward pass without a backward pass leaves gathered."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
            if hasattr(module, "set_requires_gradient_sync"):  # sharded
                module.reshard()  # type: ignore[operator]


@contextlib.contextmanager
def _own_random_numbers(seed: int, mesh: Mesh) -> Iterator[None]:
    """Draw the same numbers in each evaluation, so that two can be compared, and none of training's."""
    states = random_states(mesh.place)
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_states(states, mesh.place)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _numbers(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Bring sums from the device to the host, all at once."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _counted(pairs: Sequence[torch.Tensor]) -> Counter[tuple[int, int]]:
    """Count pairs of a predicted and a true class, [2, samples] each, by the true and the predicted one."""
    if not pairs:
        return Counter()
    every: Any = torch.cat(list(pairs), dim=1).cpu()
    kinds, counts = every.unique(dim=1, return_counts=True)
    return Counter({(true, guess): n for (guess, true), n in zip(kinds.T.tolist(), counts.tolist(), strict=True)})


def _means(parts: Sequence[Mapping[str, float]], samples: int) -> dict[str, float]:
    means: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            means[name] = means.get(name, 0.0) + value / samples
    return means
