"""`after_step`: averaged weights are part of the model, its checkpoints and its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import (
    Averaged,
    Follower,
    assert_resumes_exactly,
    by_hand,
    follow,
    global_batches,
    job,
    run,
)
from support.parallel_training import ADAM_SHIFT, SIX_DIGITS, TRAIN, Model, Windows, losses
from torch import nn

from cloudtrain_runtime.contract import ParallelConfig

pytestmark = pytest.mark.processes

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "two": (2, ParallelConfig()),
    "three": (3, ParallelConfig()),
    "fsdp": (2, ParallelConfig(data="fsdp")),
}


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], nn.Module]:
    models: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    task = Follower(30)

    def take(model: nn.Module, batch: Any) -> torch.Tensor:
        if not models:
            models.append(model)
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=TRAIN.learning_rate))
        optimizers[0].zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()
        follow(model)
        return loss

    return by_hand(task, take, global_batches(task)), models[0]


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [*((layout, 1) for layout in LAYOUTS), ("one", 2), ("two", 2), ("three", 2)],
)
def test_the_average_is_that_of_a_hand_written_loop(
    layout: str, accumulate: int, expected: tuple[list[float], nn.Module], tmp_path: Path
) -> None:
    ranks, parallel = LAYOUTS[layout]
    train = job(ranks, accumulate=accumulate, parallel=parallel)
    found = run(train, ranks, tmp_path, Follower, arguments={"validates": 7})
    values, model = expected
    assert found.losses == pytest.approx(values, rel=SIX_DIGITS)
    assert found.weights is not None
    for name, weight in model.state_dict().items():
        assert torch.allclose(found.weights[name], weight, rtol=0, atol=ADAM_SHIFT * len(values)), (
            name
        )
    with torch.no_grad():
        loss = Follower(1).loss(model.eval(), Windows(7, seed=2).texts)
    evaluated = [event["loss"] for event in found.events if event["event"] == "evaluation"]
    assert evaluated[-1] == pytest.approx(float(loss), rel=SIX_DIGITS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_resume_exactly(layout: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    assert_resumes_exactly(job(ranks, parallel=parallel), ranks, tmp_path, Follower)


def test_a_pipeline_with_after_step_is_refused(tmp_path: Path) -> None:
    train = job(1, accumulate=2, parallel=ParallelConfig(pipeline=2))
    found = losses(train, 2, tmp_path, task=Follower)
    assert "train.parallel.pipeline: after_step() does not work with a pipeline" in str(
        found.reason
    )


def test_fsdp_that_accumulates_around_an_average_is_refused(tmp_path: Path) -> None:
    found = losses(
        job(2, accumulate=2, parallel=ParallelConfig(data="fsdp")), 2, tmp_path, task=Follower
    )
    assert "data: fsdp cannot accumulate without it" in str(found.reason)
    assert "set train.accumulate to 1" in str(found.reason)


def test_the_average_starts_as_the_model() -> None:
    model = Averaged(Model(0.0))
    texts = Windows(3).texts[:, :-1]
    assert torch.equal(model(texts), model.eval()(texts))
