"""Losses as a sum and its count: each counted token has the same weight in a step, on any ranks and micro-steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import (
    Empty,
    Masked,
    Mixed,
    assert_resumes_exactly,
    by_hand,
    global_batches,
    job,
    masked_loss,
    run,
)
from support.parallel_training import SIX_DIGITS, TRAIN, Windows, losses
from torch import nn

from cloudtrain_runtime.contract import ParallelConfig

pytestmark = pytest.mark.processes

SPLIT = ParallelConfig(data="fsdp")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of a loop in one process that divides by the tokens of the global batch."""
    return by_hand(Masked(30), hand_written_step(), global_batches(Masked(30)))


def hand_written_step() -> Any:
    optimizers: list[torch.optim.Optimizer] = []

    def take(model: nn.Module, batch: Any) -> torch.Tensor:
        optimizer = (optimizers or [torch.optim.AdamW(model.parameters(), lr=TRAIN.learning_rate)])[
            0
        ]
        optimizers[:] = [optimizer]
        optimizer.zero_grad()
        total, count = masked_loss(model, batch)
        loss = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return take


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tokens_weigh_the_same_as_in_a_hand_written_loop(
    ranks: int, accumulate: int, expected: list[float], tmp_path: Path
) -> None:
    found = run(job(ranks, accumulate=accumulate), ranks, tmp_path, Masked)
    assert found.losses == pytest.approx(expected, rel=SIX_DIGITS)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, SPLIT), (2, ParallelConfig(tensor=2)), (2, ParallelConfig(pipeline=2))],
    ids=["fsdp", "tensor", "pipeline"],
)
def test_layouts_divide_by_the_same_count(
    ranks: int, parallel: ParallelConfig, expected: list[float], tmp_path: Path
) -> None:
    shares = ranks // parallel.group_size
    train = replace(job(shares, accumulate=2), parallel=parallel)
    found = run(train, ranks, tmp_path, Masked)
    assert found.losses == pytest.approx(expected, rel=SIX_DIGITS)


def test_validation_is_a_mean_over_all_counted_tokens(tmp_path: Path) -> None:
    found = run(job(3, steps=1), 3, tmp_path, Masked, arguments={"validates": 7})
    (event,) = [event for event in found.events if event["event"] == "evaluation"]
    model = Masked(1).model().double()
    assert found.weights is not None
    model.load_state_dict(dict(found.weights))
    with torch.no_grad():
        total, count = masked_loss(model, Windows(7, seed=2).texts)
    assert event["loss"] == pytest.approx(float(total / count), rel=SIX_DIGITS)
    assert event["samples"] == 7


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_summed_losses_resume_exactly(ranks: int, tmp_path: Path) -> None:
    assert_resumes_exactly(job(ranks, accumulate=2), ranks, tmp_path, Masked)


def test_fp16_and_clipping_use_the_divided_gradients(expected: list[float], tmp_path: Path) -> None:
    plain = run(job(2, clip_grad_norm=1e9), 2, tmp_path / "plain", Masked)
    scaled = run(
        job(2, clip_grad_norm=1e9, precision="fp16", skip_nonfinite=9),
        2,
        tmp_path / "scaled",
        Masked,
    )
    assert plain.losses == pytest.approx(expected, rel=SIX_DIGITS)
    assert scaled.losses[0] == pytest.approx(expected[0], rel=2e-3)
    assert scaled.grad_norms[0] == pytest.approx(plain.grad_norms[0], rel=2e-2)


def test_a_step_without_counted_tokens_has_no_gradient(tmp_path: Path) -> None:
    found = run(job(2, steps=2), 2, tmp_path, Empty)
    assert found.losses == [0.0, 0.0]
    assert found.grad_norms == [0.0, 0.0]


def test_a_mean_and_a_sum_in_one_step_are_refused(tmp_path: Path) -> None:
    found = losses(job(1, accumulate=2), 1, tmp_path, task=Mixed)
    assert found.reason == (
        "TaskError: loss() must always return a mean, or always a pair of a sum and its count; it did both"
    )
