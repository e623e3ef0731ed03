"""Unusual models, and killed runs, with each kind of parallelism."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from support.parallel_training import (
    ADAM_SHIFT,
    SIX_DIGITS,
    TRAIN,
    Outcome,
    losses,
)
from support.sizes import combinations
from support.unusual_models import Killed, Odd

from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig, TrainConfig

pytestmark = pytest.mark.processes

FSDP = ParallelConfig(data="fsdp")
FEW = replace(TRAIN, steps=3, batch_size=8, accumulate=2)
"""The job of one process; `train` divides its batch size by the number of ranks."""


def train(kind: str, ranks: int, folder: Path, job: TrainConfig) -> Outcome:
    job = replace(job, batch_size=8 // ranks)
    arguments = {"kind": kind}
    return losses(
        job,
        ranks,
        folder,
        task=Odd,
        arguments=arguments,
        checkpoint=saving(folder),
        dtype=torch.float64,
    )


def saving(folder: Path) -> CheckpointConfig:
    return CheckpointConfig((folder / "checkpoints").as_uri(), None, 1, 2, "auto")


@cache
def of_one_process(kind: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        single = train(kind, 1, Path(folder), FEW)
    assert single.reason is None, single.text
    return single


KINDS = ("buffers", "tied blocks", "same block", "lists", "mapping", "single", "tied", "frozen")


@pytest.mark.parametrize(("kind", "data"), combinations(KINDS, ("ddp", "fsdp")))
def test_an_unusual_model_gives_the_losses_of_one_process(
    kind: str, data: str, tmp_path: Path
) -> None:
    parallel = FSDP if data == "fsdp" else ParallelConfig()
    if kind == "buffers" and torch.__version__ < "2.6":
        pytest.skip("Gloo of torch 2.5 does not send complex numbers")
    single = of_one_process(kind)
    job = replace(FEW, parallel=parallel, activation_checkpointing=parallel.data == "fsdp")
    first = train(kind, 2, tmp_path, replace(job, steps=2))
    rest = train(kind, 2, tmp_path, job)
    assert first.reason is rest.reason is None, first.text + rest.text
    assert [*first.losses, *rest.losses] == pytest.approx(single.losses, rel=SIX_DIGITS)
    assert rest.weights is not None
    assert single.weights is not None
    assert list(rest.weights) == list(single.weights)
    for name, value in rest.weights.items():
        torch.testing.assert_close(value, single.weights[name], rtol=0, atol=FEW.steps * ADAM_SHIFT)


@pytest.mark.parametrize(
    ("kind", "parallel", "reason"),
    [
        (
            "root",
            FSDP,
            "JobError: train.parallel: a parameter without a dimension cannot be sharded: scale",
        ),
        ("unused block", FSDP, "TaskError: the model has a block that the loss does not depend on"),
        (
            "unused",
            ParallelConfig(),
            "TaskError: the loss of this step does not depend on spare.weight, spare.bias, and",
        ),
    ],
)
def test_an_unsupported_model_is_rejected_with_a_reason(
    kind: str, parallel: ParallelConfig, reason: str, tmp_path: Path
) -> None:
    found = train(kind, 2, tmp_path, replace(FEW, parallel=parallel))
    assert found.reason is not None
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("parallel", [ParallelConfig(), FSDP], ids=["ddp", "fsdp"])
def test_recomputed_activations_count_once_in_statistics(
    parallel: ParallelConfig, tmp_path: Path
) -> None:
    job = replace(FEW, parallel=parallel)
    kept = train("normed", 2, tmp_path / "kept", job)
    recomputed = train(
        "normed", 2, tmp_path / "recomputed", replace(job, activation_checkpointing=True)
    )
    assert recomputed.reason is kept.reason is None, recomputed.text
    assert recomputed.weights is not None
    assert kept.weights is not None
    assert recomputed.weights["norm.num_batches_tracked"] == 3 * 2
    assert all(torch.equal(value, kept.weights[name]) for name, value in recomputed.weights.items())


LAYOUTS = {
    "fsdp": (2, FSDP),
    "tensor": (2, ParallelConfig(tensor=2)),
    "pipeline": (2, ParallelConfig(pipeline=2)),
    "fsdp x tensor": (4, ParallelConfig(data="fsdp", tensor=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_after_a_kill_is_bit_exact(layout: str, tmp_path: Path) -> None:
    """Use all features that have a state at the same time, and epochs that end with an uneven step."""
    ranks, parallel = LAYOUTS[layout]
    job = replace(
        TRAIN,
        epochs=2,
        steps=None,
        batch_size=2 if parallel.data == "fsdp" else 4,
        accumulate=3,
        evaluate_every_steps=2,
        export="best",
        workers=1 if ranks == 2 else 0,  # worker processes are too many for the largest layout
        schedule="cosine",
        warmup_steps=2,
        skip_nonfinite=2,
        parallel=parallel,
    )

    def run(folder: Path, killed_at: int = 0) -> Outcome:
        settings = {"dropout": 0.3, "validates": 3, "killed_at": killed_at}
        return losses(
            job,
            ranks,
            folder,
            samples=30,
            task=Killed,
            arguments=settings,
            checkpoint=saving(folder),
        )

    uninterrupted = run(tmp_path / "uninterrupted")
    assert uninterrupted.reason is None, uninterrupted.text
    # Killed in the fifth step, after the checkpoint of step 2 is complete. A pipeline calls the loss twice.
    killed = run(tmp_path / "killed", killed_at=13 * parallel.pipeline)
    assert killed.reason is not None
    rest = run(tmp_path / "killed")
    assert rest.reason is None, rest.text
    assert 0 < len(rest.losses) < len(uninterrupted.losses) == 6
    assert rest.losses == uninterrupted.losses[-len(rest.losses) :]
    assert rest.grad_norms == uninterrupted.grad_norms[-len(rest.losses) :]
    assert rest.weights is not None
    assert uninterrupted.weights is not None
    assert all(
        torch.equal(value, uninterrupted.weights[name]) for name, value in rest.weights.items()
    )
