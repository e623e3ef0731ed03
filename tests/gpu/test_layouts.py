"""Layouts: one rank with NCCL, several that share a card with Gloo and, with more GPUs, NCCL between them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import DEVICE, GPUS, TRAIN, Finished, train

from cloudtrain_runtime.contract import ParallelConfig, TrainConfig

EXACT = replace(TRAIN, batch_size=8, accumulate=2, clip_grad_norm=1.0)
GLOBAL_BATCH = 16
BOUND = 1e-6
"""Relative tolerance of losses and weights in float64: another order of summation, over 8 steps of SGD."""


def of(parallel: ParallelConfig, ranks: int) -> TrainConfig:
    """Return the configuration that trains the same global batches on this many ranks."""
    accumulate = max(2, parallel.pipeline)
    replicas = ranks // parallel.group_size
    return replace(
        EXACT,
        parallel=parallel,
        accumulate=accumulate,
        batch_size=GLOBAL_BATCH // accumulate // replicas,
    )


def compare(one: Finished, other: Finished) -> None:
    assert other.code == 0, other.log
    assert other.losses == pytest.approx(one.losses, rel=1e-5)  # events have six digits
    for name, value in one.weights.items():
        torch.testing.assert_close(other.weights[name], value, rtol=BOUND, atol=BOUND)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One rank, for comparison."""
    done = train(tmp_path_factory.mktemp("single"), EXACT, double=True, optimizer="sgd")
    assert done.code == 0, done.log
    return done


def test_one_rank_per_gpu_uses_nccl(single: Finished) -> None:
    assert single.started["backend"] == ("nccl" if GPUS else "gloo")
    assert single.started["device"] == DEVICE


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_that_share_a_card(tmp_path: Path, single: Finished, ranks: int) -> None:
    if ranks <= GPUS:
        pytest.skip(f"{ranks} ranks have a GPU each here")
    done = train(tmp_path, of(ParallelConfig(), ranks), ranks=ranks, double=True, optimizer="sgd")
    compare(single, done)
    assert done.started["backend"] == "gloo"
    assert {done.seen(rank)["compute_device"] for rank in range(ranks)} == {DEVICE}


@pytest.mark.parametrize("offload", [False, True])
def test_shards_of_one_rank(tmp_path: Path, single: Finished, offload: bool) -> None:
    parallel = ParallelConfig(data="fsdp", offload=offload)
    done = train(tmp_path, of(parallel, 1), double=True, optimizer="sgd")
    compare(single, done)
    seen = done.seen()
    assert seen["compute_device"] == DEVICE
    assert seen["weight_device"] == ("cpu" if offload else DEVICE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_offload_in_low_precision(tmp_path: Path, precision: str, optimizer: str) -> None:
    chosen = replace(
        TRAIN,
        precision=precision,
        steps=30,
        clip_grad_norm=1.0,
        skip_nonfinite=3,
        parallel=ParallelConfig(data="fsdp", offload=True),
    )
    done = train(tmp_path, chosen, optimizer=optimizer, fails={"rank": 0, "step": 4, "how": "nan"})
    assert done.code == 0, done.log
    assert len(done.events("skipped")) >= 1
    assert done.losses[-1] < done.losses[0]


@pytest.mark.cuda
def test_offload_needs_less_gpu_memory(tmp_path: Path) -> None:
    sizes = {"width": 1024, "blocks": 8, "heads": 8}
    peaks = []
    for offload in (False, True):
        parallel = ParallelConfig(data="fsdp", offload=offload)
        done = train(tmp_path / str(offload), replace(TRAIN, parallel=parallel), **sizes)
        assert done.code == 0, done.log
        peaks.append(max(event["memory_bytes"] for event in done.events("step")))
    # Without offload the GPU holds weights, gradients and two moments: 16 bytes per parameter.
    assert peaks[0] - peaks[1] > 8 * done.started["parameters"]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(data="fsdp"), ParallelConfig(tensor=2), ParallelConfig(pipeline=2)],
    ids=str,
)
def test_ranks_that_share_a_card_refuse_shards(tmp_path: Path, parallel: ParallelConfig) -> None:
    ranks = 2 * GPUS
    done = train(tmp_path, of(parallel, ranks), ranks=ranks)
    assert done.code == 1
    assert "ranks that share a GPU use Gloo, which supports data: ddp only" in done.failure, (
        done.log
    )


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(static_graph=True),
        ParallelConfig(data="fsdp"),
        ParallelConfig(data="fsdp", offload=True),
        ParallelConfig(tensor=2),
        *(
            ParallelConfig(pipeline=2, schedule=name)
            for name in ("gpipe", "1f1b", "interleaved", "zero_bubble")
        ),
    ],
    ids=str,
)
def test_layouts_of_two_gpus_with_nccl(
    tmp_path: Path, single: Finished, parallel: ParallelConfig
) -> None:
    done = train(tmp_path, of(parallel, 2), ranks=2, double=True, optimizer="sgd", blocks=2)
    compare(single, done)
    assert done.started["backend"] == "nccl"
