"""`sampler`: a Task draws the order of its samples, each rank takes its part, and a resume continues exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import (
    Batched,
    Chosen,
    Divided,
    Outside,
    assert_resumes_exactly,
    by_hand,
    global_batches,
    job,
    run,
)
from support.parallel_training import SIX_DIGITS, TRAIN, Small, losses
from torch import nn

from cloudtrain_runtime.data.global_order import TaskOrder
from cloudtrain_runtime.errors import TaskError

pytestmark = pytest.mark.processes


def order_of(epoch: int) -> list[int]:
    """Return the indices of an epoch, drawn in this process."""
    task = Chosen(30)
    data = task.datasets()["train"]
    order = TaskOrder(task.sampler(data), 30, TRAIN.seed, epoch)
    return order.at(torch.arange(26)).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    models: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    task = Chosen(30)

    def take(model: nn.Module, batch: Any) -> torch.Tensor:
        if not models:
            models.append(model)
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=TRAIN.learning_rate))
        optimizers[0].zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()
        return loss

    return by_hand(task, take, global_batches(task, order_of))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_takes_the_sampler_s_steps(
    ranks: int, expected: list[float], tmp_path: Path
) -> None:
    found = run(job(ranks), ranks, tmp_path, Chosen)
    assert found.losses == pytest.approx(expected, rel=SIX_DIGITS)
    assert found.events[0]["train_samples"] == 26


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_drawn_epoch_resumes_exactly(ranks: int, tmp_path: Path) -> None:
    assert_resumes_exactly(job(ranks), ranks, tmp_path, Chosen)


def test_each_epoch_draws_another_order_by_weight() -> None:
    first, second = order_of(0), order_of(1)
    assert first == order_of(0)
    assert first != second
    assert len(set(first)) < len(first)
    assert sum(first + second) / 52 > 14.5, "the mean of equal weights"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Batched, "sampler() must yield the index of one sample at a time; it yielded a list"),
        (
            Divided,
            "sampler() must yield the same indices on every rank; these depend on rank or process",
        ),
        (Outside, "sampler() must yield indices from 0 to 29; it yielded 0 to 30"),
    ],
)
def test_an_order_that_cannot_be_shared_is_refused(
    task: type[Small], expected: str, tmp_path: Path
) -> None:
    found = losses(job(2), 2, tmp_path, samples=30, task=task)
    assert expected in str(found.reason)


def test_a_sampler_that_yields_none_is_refused() -> None:
    with pytest.raises(TaskError, match="it yielded a NoneType"):
        TaskOrder([0, None], 2, seed=0, epoch=0)  # type: ignore[list-item]
