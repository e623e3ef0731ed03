"""`training_step`: several optimizers take the steps of a hand-written loop, on any ranks, and resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gans import (
    REAL,
    Gan,
    Mistaken,
    Noisy,
    Partial,
    Points,
    Unstepped,
    discriminator_loss,
    generator_loss,
)
from support.loops import assert_resumes_exactly, by_hand, global_batches, job, run
from support.parallel_training import ADAM_SHIFT, SIX_DIGITS, losses
from torch import nn

from cloudtrain_runtime.contract import ParallelConfig

pytestmark = pytest.mark.processes

SAMPLES = 25
"""The third step of an epoch has one sample, so that the other ranks have none."""


def hand_written(
    most: float | None = None, precision: torch.dtype | None = None
) -> tuple[list[float], nn.Module]:
    """Return the added losses and the model of a loop in one process."""
    made: list[Any] = []
    task = Gan(SAMPLES)

    def step(optimizer: torch.optim.Optimizer, model: nn.Module, loss: torch.Tensor) -> None:
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        (parameters,) = (group["params"] for group in optimizer.param_groups)
        if most is not None:
            nn.utils.clip_grad_norm_(parameters, most)
        optimizer.step()

    def take(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if not made:
            made.extend([model, task.optimizer(model)])
        optimizers = made[1]
        low = {
            "device_type": "cpu",
            "dtype": precision or torch.bfloat16,
            "enabled": precision is not None,
        }
        with torch.autocast(**low):
            fake = model.generator(batch[:, REAL:])
            first = discriminator_loss(model, batch[:, :REAL], fake.detach())
        step(optimizers["discriminator"], model, first)
        with torch.autocast(**low):
            second = generator_loss(model, fake)
        step(optimizers["generator"], model, second)
        return first.float() + second.float()

    dtype = (
        torch.float32 if precision is not None else torch.float64
    )  # autocast leaves float64 as it is
    values = by_hand(task, take, global_batches(task), dtype)
    return values, made[0]


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], nn.Module]:
    return hand_written()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_gan_takes_the_steps_of_a_hand_written_loop(
    ranks: int, expected: tuple[list[float], nn.Module], tmp_path: Path
) -> None:
    found = run(job(ranks), ranks, tmp_path, Gan, samples=SAMPLES, arguments={"validates": 7})
    values, model = expected
    assert found.losses == pytest.approx(values, rel=SIX_DIGITS)
    parts = [event["metrics"] for event in found.events if event["event"] == "step"]
    sums = [each["discriminator_loss"] + each["generator_loss"] for each in parts]
    assert sums == pytest.approx(values, rel=SIX_DIGITS)
    assert found.weights is not None
    for name, weight in model.state_dict().items():
        assert torch.allclose(found.weights[name], weight, rtol=0, atol=ADAM_SHIFT * len(values)), (
            name
        )
    with torch.no_grad():
        loss = Gan(1).loss(model.eval(), Points(7, seed=2).values)
    evaluated = [event["loss"] for event in found.events if event["event"] == "evaluation"]
    assert evaluated[-1] == pytest.approx(float(loss), rel=SIX_DIGITS)


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_update_is_clipped_by_itself(ranks: int, tmp_path: Path) -> None:
    found = run(job(ranks, clip_grad_norm=0.05), ranks, tmp_path, Gan, samples=SAMPLES)
    assert found.losses == pytest.approx(hand_written(0.05)[0], rel=SIX_DIGITS)
    assert len(found.grad_norms) == len(found.losses)


def test_bf16_computes_with_the_updated_weights(tmp_path: Path) -> None:
    found = run(job(1, precision="bf16"), 1, tmp_path, Gan, samples=SAMPLES, dtype=torch.float32)
    assert found.losses == pytest.approx(hand_written(precision=torch.bfloat16)[0], rel=SIX_DIGITS)


def test_fp16_scales_the_loss_of_each_update(tmp_path: Path) -> None:
    plain = run(job(2), 2, tmp_path / "plain", Gan, samples=SAMPLES, dtype=torch.float32)
    scaled = run(
        job(2, precision="fp16"), 2, tmp_path / "scaled", Gan, samples=SAMPLES, dtype=torch.float32
    )
    # The first steps are skipped until the scale is low enough.
    assert scaled.losses == pytest.approx(plain.losses, rel=0.05)
    assert scaled.grad_norms[-1] == pytest.approx(plain.grad_norms[-1], rel=0.3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_several_optimizers_resume_exactly(ranks: int, tmp_path: Path) -> None:
    assert_resumes_exactly(job(ranks, warmup_steps=7), ranks, tmp_path, Noisy, samples=SAMPLES)


def test_a_layer_that_one_rank_uses_is_updated_on_all(tmp_path: Path) -> None:
    found = run(job(3), 3, tmp_path, Partial, samples=SAMPLES)
    assert found.weights is not None
    assert found.weights["generator.3.bias"].all()
    assert found.weights["generator.4.weight"].item() == 1.0  # not even decayed


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (
            "name",
            "called update('discriminater'), and optimizer() returns none of this name; did you mean",
        ),
        (
            "shape",
            "must call update('generator') with a scalar loss, the mean over the samples; it got a tensor of",
        ),
        (
            "detached",
            "must call update('generator') with a loss that depends on the model's parameters",
        ),
        (
            "other parameters",
            "must call update('generator') with a loss that depends on the parameters of this",
        ),
        ("early", "must compute the loss of update('generator') after the update before it"),
        ("never", "must call update(name, loss) in each step; it did not"),
        (
            "single",
            'optimizer() must return a mapping such as {"generator": optimizer}; it returned a SGD',
        ),
        (
            "shared",
            "optimizer() must give each parameter to one optimizer; generator and other share one",
        ),
        (
            "none",
            'optimizer() must return a mapping such as {"generator": optimizer}; it returned an empty one',
        ),
        (
            "listed",
            'optimizer() must return a mapping such as {"generator": optimizer}; a is a list',
        ),
    ],
)
def test_a_mistake_in_a_training_step(mistake: str, expected: str, tmp_path: Path) -> None:
    found = losses(
        job(1), 1, tmp_path, samples=SAMPLES, task=Mistaken, arguments={"mistake": mistake}
    )
    assert str(found.reason).startswith("TaskError: ")
    assert "gans.py:" in str(found.reason)
    assert expected in str(found.reason)


def test_several_optimizers_need_a_training_step(tmp_path: Path) -> None:
    found = losses(job(1), 1, tmp_path, samples=SAMPLES, task=Unstepped)
    assert (
        "it returned a dict: several optimizers need training_step(self, model, batch, update)"
        in str(found.reason)
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"accumulate": 2}, "accumulate"),
        ({"skip_nonfinite": 3}, "skip_nonfinite"),
        ({"compile": True}, "compile"),
        ({"parallel": ParallelConfig(data="fsdp")}, "parallel.data"),
    ],
)
def test_a_training_step_refuses_other_loops(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    found = losses(job(2, **changes), 2, tmp_path, samples=SAMPLES, task=Gan)
    assert f"JobError: train.{field}: does not work with training_step()" in str(found.reason)
