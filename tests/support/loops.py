"""Training loops written by hand, and Tasks that must take the same steps on any number of ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from cloudtrain_runtime import GlobalOrderSampler
from cloudtrain_runtime.contract import CheckpointConfig, TrainConfig
from cloudtrain_runtime.process.seeds import seed_everything
from support.parallel_training import TRAIN, VOCABULARY, Model, Outcome, Small, Windows, losses

GLOBAL_BATCH, SAMPLES, STEPS = 12, 30, 8
"""Three steps in an epoch, the last with six samples."""


def job(ranks: int = 1, *, accumulate: int = 1, **changes: Any) -> TrainConfig:
    """Return a job whose steps have the same samples at any number of ranks."""
    train = replace(
        TRAIN, steps=STEPS, batch_size=GLOBAL_BATCH // ranks // accumulate, accumulate=accumulate
    )
    return replace(train, **{"clip_grad_norm": None, **changes})


def run(train: TrainConfig, ranks: int, folder: Path, task: type[Small], **options: Any) -> Outcome:
    """Train in float64; fail with the output of the ranks where they fail."""
    found = losses(
        train,
        ranks,
        folder,
        **{"samples": SAMPLES, "task": task, "dtype": torch.float64, **options},
    )
    assert found.reason is None, found.text
    return found


def global_batches(
    task: Small, order: Callable[[int], Sequence[int]] | None = None
) -> Iterator[Any]:
    """Yield the batches of a loop in one process: those of the global order, or of an epoch's own."""
    data = task.datasets()["train"]
    sampler = GlobalOrderSampler(
        len(data), batch_size=GLOBAL_BATCH, seed=TRAIN.seed, rank=0, world_size=1
    )  # type: ignore[arg-type]
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        own = None if order is None else list(order(epoch))
        cut = (
            (own[at : at + GLOBAL_BATCH] for at in range(0, len(own), GLOBAL_BATCH))
            if own is not None
            else sampler
        )
        for indices in cut:
            yield task.collate([data[index] for index in indices])
        epoch += 1


def by_hand(
    task: Small,
    take_step: Callable[[nn.Module, Any], torch.Tensor],
    batches: Iterator[Any],
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """Return the losses of a loop in one process; `take_step` gets the model and a global batch, returns the loss."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        seed_everything(TRAIN.seed)
        model = task.model()
        return [
            float(take_step(model, batch).detach())
            for _, batch in zip(range(STEPS), batches, strict=False)
        ]
    finally:
        torch.set_default_dtype(before)


def assert_resumes_exactly(
    train: TrainConfig,
    ranks: int,
    folder: Path,
    task: type[Small],
    *,
    stops_at: int = 5,
    **options: Any,
) -> None:
    """Compare a run that is stopped and resumed, by default inside of an epoch, with one that is not, bit by bit."""
    saving = CheckpointConfig((folder / "checkpoints").as_uri(), None, None, 1, "auto")
    options = {"dtype": torch.float32, **options}
    whole = run(train, ranks, folder / "whole", task, **options)
    first = run(
        replace(train, steps=stops_at), ranks, folder / "parts", task, checkpoint=saving, **options
    )
    rest = run(train, ranks, folder / "parts", task, checkpoint=saving, **options)
    assert rest.events[0]["step"] == stops_at
    assert first.losses + rest.losses == whole.losses
    assert whole.weights is not None
    assert rest.weights is not None
    assert whole.weights.keys() == rest.weights.keys()
    assert all(torch.equal(whole.weights[name], rest.weights[name]) for name in whole.weights)


class Masked(Small):
    """Ignores the targets below a number that is different for each text, and returns the sum and the count."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return masked_loss(model, batch)


class Mixed(Small):
    """Returns a mean for one micro-batch, and a sum with its count for the next."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        return masked_loss(model, batch) if self.calls % 2 else super().loss(model, batch)


def masked_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of the targets that are at least the text's first token, and their number."""
    targets = torch.where(batch[:, 1:] >= batch[:, :1], batch[:, 1:], -100)
    total = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets >= 0).sum()


class Empty(Small):
    """Has texts without any counted target."""

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        data = Windows(self.samples)
        data.texts[:, 1:] = 0
        data.texts[:, 0] = VOCABULARY - 1
        return {"train": data}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return masked_loss(model, batch)


class Contrastive(Small):
    """Compares the halves of each text with those of all texts of the global batch."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return contrastive_loss(model, batch)


class StreamedContrastive(Contrastive):
    """Reads the texts as a stream."""

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {split: TextStream(data) for split, data in super().datasets().items()}


class TextStream(IterableDataset[Any]):
    """The samples of a data set, in its order."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


def contrastive_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss over the texts of all ranks."""
    scores = model(batch[:, :-1])
    halves = torch.cat([scores[:, :4].mean(1), scores[:, 4:].mean(1)], dim=1)
    if dist.is_initialized() and dist.get_world_size() > 1:
        halves = torch.cat(all_gather(halves))  # type: ignore[no-untyped-call]
    first, second = halves.chunk(2, dim=1)
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))


class Averaged(nn.Module):
    """A model and its average, which evaluation uses."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.average = copy.deepcopy(student).requires_grad_(False)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = (self.student if self.training else self.average)(x_BT)
        return scores


class Follower(Small):
    """Averages the weights after each step."""

    def model(self) -> nn.Module:
        return Averaged(Model(self.dropout))

    def parallelize(self, model: Any, mesh: Any) -> Any:  # noqa: ARG002
        return [*model.student.blocks, *model.average.blocks]

    def after_step(self, model: nn.Module) -> None:
        follow(model)


@torch.no_grad()
def follow(model: Any) -> None:
    """Move the average a tenth of the way to the weights."""
    for average, weight in zip(model.average.parameters(), model.student.parameters(), strict=True):
        average.lerp_(weight, 0.1)


class Chosen(Small):
    """Draws texts by weights, some of them several times in an epoch."""

    def sampler(self, dataset: Dataset[Any]) -> Sampler[int]:  # noqa: ARG002
        weights: Any = torch.arange(self.samples, dtype=torch.float64) + 1.0
        return WeightedRandomSampler(weights, self.samples - 4, generator=torch.Generator())


class Batched(Small):
    """Returns a batch sampler by mistake."""

    def sampler(self, dataset: Any) -> Any:
        return BatchSampler(SequentialSampler(dataset), 4, drop_last=False)


class Divided(Small):
    """Returns another order on each rank by mistake."""

    def sampler(self, dataset: Any) -> Any:
        return list(range(len(dataset)))[:: -1 if os.environ["RANK"] == "0" else 1]


class Outside(Small):
    """Returns an index behind the last sample by mistake."""

    def sampler(self, dataset: Any) -> Any:
        return [0, len(dataset)]


class Grown(Small):
    """Has one layer more, if asked."""

    def __init__(self, samples: int, *, has_more: bool = False) -> None:
        super().__init__(samples)
        self.has_more = has_more

    def model(self) -> nn.Module:
        model: Any = Model(self.dropout)
        if self.has_more:
            model.more = nn.Linear(2, 2)
        return model
