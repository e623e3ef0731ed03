"""`train.drop_last`: every rank has equally many samples in each step, so that losses may use collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import (
    GLOBAL_BATCH,
    Contrastive,
    StreamedContrastive,
    assert_resumes_exactly,
    by_hand,
    contrastive_loss,
    global_batches,
    job,
    run,
)
from support.parallel_training import SIX_DIGITS, TRAIN, Small, losses
from support.sizes import combinations
from torch import nn

from cloudtrain_runtime import GlobalOrderSampler
from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def expected() -> list[float]:
    optimizers: list[torch.optim.Optimizer] = []

    def take(model: nn.Module, batch: Any) -> torch.Tensor:
        optimizer = (optimizers or [torch.optim.AdamW(model.parameters(), lr=TRAIN.learning_rate)])[
            0
        ]
        optimizers[:] = [optimizer]
        optimizer.zero_grad()
        loss = contrastive_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return by_hand(Contrastive(30), take, full_batches())


def full_batches() -> Iterator[Any]:
    return (batch for batch in global_batches(Contrastive(30)) if len(batch) == GLOBAL_BATCH)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_contrastive_loss_is_that_of_one_process(
    ranks: int, expected: list[float], tmp_path: Path
) -> None:
    """Thirty samples are two steps of twelve; six are left out of each epoch."""
    found = run(job(ranks, drop_last=True), ranks, tmp_path, Contrastive)
    assert found.losses == pytest.approx(expected, rel=SIX_DIGITS)
    assert found.events[-1]["epochs"] == 4


def test_a_contrastive_loss_works_with_fsdp(expected: list[float], tmp_path: Path) -> None:
    train = job(2, drop_last=True, parallel=ParallelConfig(data="fsdp"))
    assert run(train, 2, tmp_path, Contrastive).losses == pytest.approx(expected, rel=SIX_DIGITS)


@pytest.mark.parametrize(
    ("ranks", "task"), combinations([3, 2, 1], [Contrastive, StreamedContrastive])
)
def test_runs_that_drop_samples_resume_exactly(
    ranks: int, task: type[Small], tmp_path: Path
) -> None:
    assert_resumes_exactly(job(ranks, drop_last=True), ranks, tmp_path, task)


def test_a_stream_drops_its_last_incomplete_step(tmp_path: Path) -> None:
    train = job(2, drop_last=True, steps=None, epochs=2)
    found = run(train, 2, tmp_path, StreamedContrastive)
    assert (found.events[-1]["step"], found.events[-1]["epochs"]) == (4, 2)


def test_epochs_count_full_steps_only(tmp_path: Path) -> None:
    found = run(job(2, drop_last=True, steps=None, epochs=2), 2, tmp_path, Contrastive)
    assert found.events[0]["total_steps"] == found.events[-1]["step"] == 4


def test_evaluation_gives_each_rank_equally_many_samples(tmp_path: Path) -> None:
    found = run(
        job(3, drop_last=True, steps=1), 3, tmp_path, Contrastive, arguments={"validates": 14}
    )
    assert [event["samples"] for event in found.events if event["event"] == "evaluation"] == [12]


def test_too_few_samples_for_a_step_are_refused(tmp_path: Path) -> None:
    found = losses(job(2, drop_last=True), 2, tmp_path, samples=11, task=Contrastive)
    assert found.reason == (
        "TaskError: train.drop_last: the training data has 11 samples, fewer than the 12 of a step: lower "
        "train.batch_size or train.accumulate, or set train.drop_last: false"
    )


def test_a_resume_that_cannot_share_equally_is_refused(tmp_path: Path) -> None:
    saving = CheckpointConfig((tmp_path / "checkpoints").as_uri(), None, None, 1, "auto")
    train = job(2, drop_last=True, steps=1)
    assert (
        losses(train, 2, tmp_path, samples=30, task=Contrastive, checkpoint=saving).reason is None
    )
    again = losses(
        replace(train, steps=3), 5, tmp_path, samples=30, task=Contrastive, checkpoint=saving
    )
    assert "the global batch of 12 samples cannot be shared equally by 5 ranks" in str(again.reason)


def test_a_script_drops_the_same_samples() -> None:
    sampler = GlobalOrderSampler(30, batch_size=6, drop_last=True, rank=1, world_size=2)
    assert [len(indices) for indices in sampler] == [6, 6]
    assert len(sampler) == sampler.steps_per_epoch == len([*sampler.schedule()]) == 2
    sampler.advance()
    sampler.advance()
    assert (sampler.epoch, sampler.position.samples) == (1, 0)
