"""Precisions on one GPU: what computes in which type, and that training succeeds in each."""

from dataclasses import replace
from pathlib import Path

import pytest
from running import DEVICE, TRAIN, train

DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
@pytest.mark.parametrize("precision", DTYPES)
def test_training_in_each_precision(tmp_path: Path, precision: str, optimizer: str) -> None:
    done = train(
        tmp_path,
        replace(TRAIN, precision=precision, steps=30, clip_grad_norm=1.0),
        optimizer=optimizer,
    )
    assert done.code == 0, done.log
    assert done.started["device"] == DEVICE
    seen = done.seen()
    assert (seen["compute_dtype"], seen["compute_device"]) == (DTYPES[precision], DEVICE)
    assert (seen["weight_dtype"], seen["weight_device"]) == ("torch.float32", DEVICE)
    assert sum(done.losses[-5:]) < 0.97 * sum(done.losses[:5])
    assert all(event["grad_norm"] > 0 for event in done.events("step"))


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_a_step_with_a_nan_is_skipped(tmp_path: Path, optimizer: str) -> None:
    fails = {"rank": 0, "step": 4, "how": "nan"}
    done = train(tmp_path, replace(TRAIN, skip_nonfinite=2), optimizer=optimizer, fails=fails)
    assert done.code == 0, done.log
    assert [event["step"] for event in done.events("skipped")] == [4]
    assert done.events("finished")[0]["skipped"] == 1
    assert all(bool(value.isfinite().all()) for value in done.weights.values())


def test_fp16_lowers_its_scale_after_an_overflow(tmp_path: Path) -> None:
    fails = {"rank": 0, "step": 4, "how": "nan"}
    done = train(tmp_path, replace(TRAIN, precision="fp16", steps=30), fails=fails)
    assert done.code == 0, done.log
    assert all(bool(value.isfinite().all()) for value in done.weights.values())
    assert done.losses[-1] < done.losses[0]
