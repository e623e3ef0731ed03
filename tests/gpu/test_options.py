"""Options of training and figures of runs: compilation, recomputation, profiles, memory, FLOPs and MFU."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import DEVICE, TRAIN, train

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.metrics.flops import peak_flops

BIG = {"width": 512, "blocks": 4, "heads": 8, "length": 128}


def test_compiled_training_has_the_same_losses(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", TRAIN, optimizer="sgd")
    compiled = train(tmp_path / "compiled", replace(TRAIN, compile=True), optimizer="sgd")
    assert compiled.code == 0, compiled.log
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_recomputation_of_activations(tmp_path: Path, data: str) -> None:
    runs = []
    for recomputes in (False, True):
        chosen = replace(
            TRAIN,
            activation_checkpointing=recomputes,
            batch_size=32,
            parallel=ParallelConfig(data=data),
        )
        runs.append(train(tmp_path / str(recomputes), chosen, optimizer="sgd", **BIG))
        assert runs[-1].code == 0, runs[-1].log
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)
    assert runs[1].seen()["passes"] == 2 * runs[0].seen()["passes"]
    if DEVICE == "cuda":
        without, with_ = (
            max(event["memory_bytes"] for event in run.events("step")) for run in runs
        )
        assert with_ < without


def test_a_profile_is_written(tmp_path: Path) -> None:
    done = train(tmp_path, replace(TRAIN, profile_at=3, profile_steps=2))
    assert done.code == 0, done.log
    traces = [path for path in (done.folder / "output").rglob("*") if "trace" in path.name]
    assert traces, done.log
    if DEVICE == "cuda":
        content = traces[0].read_bytes()
        text = gzip.decompress(content) if traces[0].suffix == ".gz" else content
        assert b"cudaLaunchKernel" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_data_workers_give_the_same_losses(tmp_path: Path, workers: int) -> None:
    done = train(tmp_path / "run", replace(TRAIN, workers=workers), optimizer="sgd")
    without = train(tmp_path / "without", replace(TRAIN, workers=0), optimizer="sgd")
    assert done.code == 0, done.log
    assert done.losses == without.losses


@pytest.mark.cuda
def test_memory_and_parameters_agree_with_a_count_by_hand(tmp_path: Path) -> None:
    done = train(tmp_path, TRAIN, **BIG)
    width, blocks, length, vocabulary = 512, 4, 128, 64
    per_block = 4 * width**2 + 2 * 4 * width**2 + 5 * width + 4 * width
    by_hand = (
        vocabulary * width
        + length * width
        + blocks * per_block
        + 2 * width
        + vocabulary * (width + 1)
    )
    assert done.started["parameters"] == by_hand
    peak = max(event["memory_bytes"] for event in done.events("step"))
    # Weights, gradients and two moments in fp32; DDP's buckets hold the gradients once more.
    assert 16 * by_hand < peak < 16 * by_hand + 4 * 10**9


@pytest.mark.cuda
def test_mfu_agrees_with_a_count_by_hand(tmp_path: Path) -> None:
    name = torch.cuda.get_device_name(0)
    peak = peak_flops(name, "bf16")
    if peak is None:
        pytest.skip(f"the peak of {name} is unknown")
    done = train(
        tmp_path, replace(TRAIN, precision="bf16", steps=20, batch_size=32), **BIG, samples=2048
    )
    event = done.events("step")[-1]
    width, blocks, length, vocabulary = 512, 4, 128, 64
    # Per token: 6 FLOPs per weight of a matrix, and 12 x width x length for attention scores and values (causal
    # kernels compute half of them; the count of FLOPs does not know that).
    matrices = blocks * 12 * width**2 + vocabulary * width
    per_token = 6 * matrices + blocks * 12 * width * length
    by_hand = event["samples_per_second"] * length * per_token / peak
    assert event["mfu"] == pytest.approx(by_hand, rel=0.3)
    assert 0 < event["mfu"] < 1
    assert set(event["split"]) == {"data", "forward", "backward", "optimizer", "checkpoint"}
    assert all(seconds >= 0 for seconds in event["split"].values())
