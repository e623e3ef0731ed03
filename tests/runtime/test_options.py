"""Options of the train section take effect; other tests check that they do not change losses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import (
    BLOCKS,
    SIX_DIGITS,
    TRAIN,
    losses,
)
from support.sizes import combinations
from support.training import (
    Fused,
    GatherRecorder,
    NonfiniteStart,
    Normed,
    Seen,
    Streamed,
    Uneven,
)

from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig, TrainConfig
from cloudtrain_runtime.process.run_context import read_context

pytestmark = pytest.mark.processes


def job(
    ranks: int = 1, *, steps: int = 2, accumulate: int = 2, parallel: Any = (), **changes: Any
) -> TrainConfig:
    layout = ParallelConfig(**dict(parallel))
    shares = ranks // layout.group_size
    size = 16 // shares // accumulate
    return replace(
        TRAIN, steps=steps, accumulate=accumulate, batch_size=size, parallel=layout, **changes
    )


def seen(folder: Path, train: TrainConfig, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """Train; return what the task `Seen` has recorded on each rank."""
    arguments = {"folder": str(folder), **options}
    found = losses(train, ranks, folder, task=Seen, arguments=arguments)
    assert found.reason is None, found.text
    return [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(ranks)]


LAYOUTS = {
    "ddp": {},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


@pytest.mark.parametrize(
    ("layout", "precision"),
    combinations(list(LAYOUTS), ["bf16", "fp16", "fp32"]),
)
def test_layers_compute_in_the_precision_of_the_job(
    layout: str, precision: str, tmp_path: Path
) -> None:
    dtypes = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
    for rank in seen(tmp_path, job(2, parallel=LAYOUTS[layout], precision=precision), 2):
        assert rank["dtypes"] == [dtypes[precision]]


def test_options_of_ddp_take_effect(tmp_path: Path) -> None:
    for name, parallel in {
        "plain": {},
        "static": {"static_graph": True},
        "small": {"bucket_bytes": 10_000},
        "half": {"compress": "bf16"},
    }.items():
        for rank in seen(tmp_path / name, job(2, parallel=parallel), 2):
            assert rank["static_graph"] == (name == "static")
            assert (rank["bucket_bytes"] == 10_000) == (name == "small")
            assert (rank["compressed"] > 0) == (name == "half")


def test_options_of_fsdp_take_effect(tmp_path: Path) -> None:
    for name, parallel, grid in (
        ("plain", {}, [4]),
        ("kept", {"reshard": False}, [4]),
        ("hybrid", {"shard": 2}, [2, 2]),
    ):
        for rank in seen(tmp_path / name, job(4, parallel={"data": "fsdp", **parallel}), 4):
            assert rank["grid"] == grid
            assert rank["reshards"] == (name != "kept")


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pipeline"])
def test_activation_checkpointing_recomputes_activations(layout: str, tmp_path: Path) -> None:
    passes = {}
    for recomputes in (False, True):
        train = job(2, steps=1, parallel=LAYOUTS[layout], activation_checkpointing=recomputes)
        passes[recomputes] = [rank["passes"] for rank in seen(tmp_path / str(recomputes), train, 2)]
    if (
        layout != "pipeline"
    ):  # a pipeline's first rank also runs forward passes to measure the layers
        assert passes[False] == [BLOCKS * 2] * 2
        assert passes[True] == [2 * BLOCKS * 2] * 2
    assert passes[True][1] == 2 * passes[False][1]


@pytest.mark.parametrize("layout", ["fsdp", "tensor", "pipeline"])
def test_stream_gives_the_same_steps_in_every_layout(layout: str, tmp_path: Path) -> None:
    parallel = LAYOUTS[layout]
    ddp = losses(job(2, steps=4), 2, tmp_path / "ddp", task=Streamed, dtype=torch.float64)
    assert len(ddp.losses) == 4, ddp.text
    found = losses(
        job(2, steps=4, parallel=parallel), 2, tmp_path / layout, task=Streamed, dtype=torch.float64
    )
    assert found.reason is None, found.text
    # Ranks that share their samples are one reader of the stream. Its order differs from that of two readers.
    expected = ddp
    if layout != "fsdp":
        expected = losses(
            job(1, steps=4), 1, tmp_path / "single", task=Streamed, dtype=torch.float64
        )
    assert found.losses == pytest.approx(expected.losses, rel=SIX_DIGITS)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": "fsdp", "tensor": 2}])
def test_norm_counts_a_partial_gradient_once(parallel: Any, tmp_path: Path) -> None:
    single = losses(job(steps=4), 1, tmp_path / "single", task=Normed, dtype=torch.float64)
    assert len(single.grad_norms) == 4, single.text
    ranks = 4 if "data" in parallel else 2
    train = job(ranks, steps=4, parallel=parallel)
    found = losses(train, ranks, tmp_path / "parallel", task=Normed, dtype=torch.float64)
    assert found.grad_norms == pytest.approx(single.grad_norms, rel=SIX_DIGITS), found.text
    assert found.losses == pytest.approx(single.losses, rel=SIX_DIGITS)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fused_optimizer_works_with_split_layers(precision: str, tmp_path: Path) -> None:
    bound, dtype = (
        (SIX_DIGITS, torch.float64)
        if precision == "fp32"
        else (torch.finfo(torch.half).eps, torch.float32)
    )
    trains = (job(precision=precision), job(2, parallel={"tensor": 2}, precision=precision))
    found = [
        losses(train, ranks, tmp_path / str(ranks), task=Fused, dtype=dtype)
        for ranks, train in enumerate(trains, 1)
    ]
    assert found[1].losses == pytest.approx(found[0].losses, rel=bound), found[1].text
    assert len(found[1].losses) == 2


def test_deterministic_pipeline_stages_ignore_measured_times(tmp_path: Path) -> None:
    cuts, first = [], []
    for deterministic in (True, False):
        for slowest in (1, 4):
            train = job(2, parallel={"pipeline": 2}, deterministic=deterministic)
            arguments = {"slowest": slowest, "dropout": 0.2}
            found = losses(
                train, 2, tmp_path / f"{deterministic}-{slowest}", task=Uneven, arguments=arguments
            )
            (event,) = [event for event in found.events if event["event"] == "pipeline"]
            cuts.append(event["links"])
            first.append(found.losses)
    assert cuts[0] == cuts[1]
    assert first[0] == first[1]
    assert cuts[2] != cuts[3], "otherwise the measured times decide"


def test_saves_resume_when_the_loss_is_finite_again(tmp_path: Path) -> None:
    """Each step sleeps 0.05 s, so that the clock requests a checkpoint at each boundary, also on a slow machine."""
    saving = CheckpointConfig((tmp_path / "saved").as_uri(), 0.01, None, 99, "never")
    train = job(steps=20, accumulate=1)
    found = losses(
        train, 1, tmp_path, task=NonfiniteStart, arguments={"bad": 16}, checkpoint=saving
    )
    assert found.reason is None, found.text
    assert (
        found.text.count(
            "its training loss is not finite; checkpoints are saved again when both are finite"
        )
        == 1
    )
    saved = [event["step"] for event in found.events if event["event"] == "checkpoint"]
    assert saved[0] == 17
    assert saved[-1] == 20


def test_the_clock_requests_a_save_until_one_is_made(tmp_path: Path) -> None:
    """A script may check for a stop before it saves, or be at a step whose checkpoint exists already."""
    checkpoints = CheckpointManager(
        CheckpointConfig(tmp_path.as_uri(), 0.01, None, 2, "never"), read_context({})
    )
    time.sleep(0.02)
    assert [checkpoints.at_boundary(step).save for step in (1, 2, 3)] == [True] * 3


def test_the_exported_model_is_sent_tensor_by_tensor(tmp_path: Path) -> None:
    single = losses(job(steps=1), 1, tmp_path / "single")
    train = job(4, steps=1, parallel={"pipeline": 2})
    found = losses(
        train, 4, tmp_path / "parallel", task=GatherRecorder, arguments={"folder": str(tmp_path)}
    )
    assert found.reason is None, found.text
    assert found.weights is not None
    assert single.weights is not None
    assert found.weights.keys() == single.weights.keys()
    stage = sum(value.numel() * value.element_size() for value in found.weights.values()) / 2
    largest = max(int((tmp_path / f"largest-{rank}").read_text()) for rank in range(4))
    assert largest < stage / 3
