"""Ranks without samples: they take part in collectives and contribute no gradients."""

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
def test_a_repeated_sample_with_nan_affects_no_step(layout: str, tmp_path: Path) -> None:
    """Of 17 samples the second data rank has a NaN in the first step, and no sample of its own in the second step."""
    ranks, parallel = LAYOUTS[layout]
    train = replace(TRAIN, steps=2, batch_size=8, accumulate=1, skip_nonfinite=1, parallel=parallel)
    if parallel.pipeline > 1:
        train = replace(train, batch_size=4, accumulate=2)
    options = {"samples": 17, "task": Weighted, "dtype": torch.float64}
    found = losses(train, ranks, tmp_path / "parallel", arguments={"bad": (15,)}, **options)  # type: ignore[arg-type]
    assert found.reason is None, found.text
    assert [event["step"] for event in found.events if event["event"] == "skipped"] == [1]
    # A single process skips the first step because of the same sample, and trains on the last sample in the second.
    one_process = replace(TRAIN, steps=2, batch_size=16, accumulate=1, skip_nonfinite=1)
    single = losses(one_process, 1, tmp_path / "single", arguments={"bad": (15,)}, **options)  # type: ignore[arg-type]
    assert found.losses[-1] == pytest.approx(single.losses[-1], rel=SIX_DIGITS)
    assert found.grad_norms[-1] == pytest.approx(single.grad_norms[-1], rel=SIX_DIGITS)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_suppressed_gradients_change_no_state(value: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model(torch.ones(2, 3)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with suppress_gradients(model):
        (model(torch.full((2, 3), value)).sum() * 0).backward()
    assert all(
        torch.equal(gradients[name], parameter.grad) for name, parameter in model.named_parameters()
    )
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    model(torch.ones(2, 3)).sum().backward()
    assert all(
        torch.equal(2 * gradients[name], parameter.grad)
        for name, parameter in model.named_parameters()
    )
