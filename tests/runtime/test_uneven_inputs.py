"""Ranks without samples take part in collectives and contribute nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.parallel_training import SIX_DIGITS, TRAIN, losses
from support.training import Weighted
from torch import nn

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.distributed.uneven_inputs import suppress_gradients

NAN = float("nan")
LAYOUTS = {
    "ddp": (2, ParallelConfig()),
    "fsdp": (2, ParallelConfig(data="fsdp")),
    "fsdp x tensor": (4, ParallelConfig(data="fsdp", tensor=2)),
    "pipeline": (4, ParallelConfig(pipeline=2)),
}


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stand_in_with_nan_spoils_no_step(layout: str, tmp_path: Path) -> None:
    """Of 17 samples the second data rank reads the NaN in the first step; in the second step it has none left."""
    ranks, parallel = LAYOUTS[layout]
    train = replace(TRAIN, steps=2, batch_size=8, accumulate=1, skip_nonfinite=1, parallel=parallel)
    if parallel.pipeline > 1:
        train = replace(train, batch_size=4, accumulate=2)
    options = {"samples": 17, "task": Weighted, "dtype": torch.float64}
    found = losses(train, ranks, tmp_path / "spread", arguments={"bad": (15,)}, **options)  # type: ignore[arg-type]
    assert found.reason is None, found.text
    assert [event["step"] for event in found.events if event["event"] == "skipped"] == [1]
    # One process that leaves out the first step for the same sample, and has the last one by itself in the second.
    single = replace(TRAIN, steps=2, batch_size=16, accumulate=1, skip_nonfinite=1)
    alone = losses(single, 1, tmp_path / "alone", arguments={"bad": (15,)}, **options)  # type: ignore[arg-type]
    assert found.losses[-1] == pytest.approx(alone.losses[-1], rel=SIX_DIGITS)
    assert found.grad_norms[-1] == pytest.approx(alone.grad_norms[-1], rel=SIX_DIGITS)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_pass_without_effect_has_zero_gradients(value: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model(torch.ones(2, 3)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with suppress_gradients(model):
        (model(torch.full((2, 3), value)).sum() * 0).backward()
    assert all(torch.equal(gradients[name], parameter.grad) for name, parameter in model.named_parameters())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    model(torch.ones(2, 3)).sum().backward()
    assert all(torch.equal(2 * gradients[name], parameter.grad) for name, parameter in model.named_parameters())
