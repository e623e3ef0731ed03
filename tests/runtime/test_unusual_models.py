"""Unusual models and killed runs with each kind of parallelism."""

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
from support.unusual_models import Killed, Odd

from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig, TrainConfig

pytestmark = pytest.mark.processes

FSDP = ParallelConfig(data="fsdp")
FEW = replace(TRAIN, steps=3, batch_size=8, accumulate=2)
"""Of one process; two have half as many samples each."""


def train(kind: str, ranks: int, folder: Path, job: TrainConfig) -> Outcome:
    job = replace(job, batch_size=8 // ranks)
    arguments = {"kind": kind}
    return losses(job, ranks, folder, task=Odd, arguments=arguments, checkpoint=saving(folder), dtype=torch.float64)


def saving(folder: Path) -> CheckpointConfig:
    return CheckpointConfig((folder / "checkpoints").as_uri(), None, 1, 2, "auto")


@cache
def of_one_process(kind: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        alone = train(kind, 1, Path(folder), FEW)
    assert alone.reason is None, alone.text
    return alone


# Both layouts of a kind follow each other, so that they share its run of one process.
@pytest.mark.parametrize("parallel", [ParallelConfig(), FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(
    "kind", ["buffers", "tied blocks", "same block", "lists", "mapping", "single", "tied", "frozen"]
)
def test_an_odd_model_makes_the_steps_of_one_process(kind: str, parallel: ParallelConfig, tmp_path: Path) -> None:
    alone = of_one_process(kind)
    job = replace(FEW, parallel=parallel, activation_checkpointing=parallel.data == "fsdp")
    begun = train(kind, 2, tmp_path, replace(job, steps=2))
    rest = train(kind, 2, tmp_path, job)
    assert begun.reason is rest.reason is None, begun.text + rest.text
    assert [*begun.losses, *rest.losses] == pytest.approx(alone.losses, rel=SIX_DIGITS)
    assert rest.weights is not None
    assert alone.weights is not None
    assert list(rest.weights) == list(alone.weights)
    for name, value in rest.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=0, atol=FEW.steps * ADAM_SHIFT)


@pytest.mark.parametrize(
    ("kind", "parallel", "reason"),
    [
        ("root", FSDP, "JobError: train.parallel: a parameter without a dimension cannot be sharded: scale"),
        ("unused block", FSDP, "TaskError: the model has a block that the loss does not depend on"),
        ("unused", ParallelConfig(), "TaskError: the model has parameters that the loss does not depend on"),
    ],
)
def test_what_cannot_work_is_told(kind: str, parallel: ParallelConfig, reason: str, tmp_path: Path) -> None:
    found = train(kind, 2, tmp_path, replace(FEW, parallel=parallel))
    assert found.reason is not None
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("parallel", [ParallelConfig(), FSDP], ids=["ddp", "fsdp"])
def test_activations_computed_again_count_once_in_statistics(parallel: ParallelConfig, tmp_path: Path) -> None:
    job = replace(FEW, parallel=parallel)
    kept = train("normed", 2, tmp_path / "kept", job)
    again = train("normed", 2, tmp_path / "again", replace(job, activation_checkpointing=True))
    assert again.reason is kept.reason is None, again.text
    assert again.weights is not None
    assert kept.weights is not None
    assert again.weights["norm.num_batches_tracked"] == 3 * 2
    assert all(torch.equal(value, kept.weights[name]) for name, value in again.weights.items())


LAYOUTS = {
    "fsdp": (2, FSDP),
    "tensor": (2, ParallelConfig(tensor=2)),
    "pipeline": (2, ParallelConfig(pipeline=2)),
    "fsdp x tensor": (4, ParallelConfig(data="fsdp", tensor=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(layout: str, tmp_path: Path) -> None:
    """With all that has a state at once, and epochs that end with an uneven step."""
    ranks, parallel = LAYOUTS[layout]
    job = replace(
        TRAIN,
        epochs=2,
        steps=None,
        batch_size=2 if parallel.data == "fsdp" else 4,
        accumulate=3,
        evaluate_every_steps=2,
        export="best",
        workers=1 if ranks == 2 else 0,  # processes of their own, which the largest layout can do without
        schedule="cosine",
        warmup_steps=2,
        skip_nonfinite=2,
        parallel=parallel,
    )

    def run(folder: Path, killed_at: int = 0) -> Outcome:
        settings = {"dropout": 0.3, "validates": 3, "killed_at": killed_at}
        return losses(job, ranks, folder, samples=30, task=Killed, arguments=settings, checkpoint=saving(folder))

    whole = run(tmp_path / "whole")
    assert whole.reason is None, whole.text
    # In the fifth step: the evaluation of the second has waited for a checkpoint. A pipeline asks the loss twice.
    killed = run(tmp_path / "killed", killed_at=13 * parallel.pipeline)
    assert killed.reason is not None
    rest = run(tmp_path / "killed")
    assert rest.reason is None, rest.text
    assert 0 < len(rest.losses) < len(whole.losses) == 6
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert rest.grad_norms == whole.grad_norms[-len(rest.losses) :]
    assert rest.weights is not None
    assert whole.weights is not None
    assert all(torch.equal(value, whole.weights[name]) for name, value in rest.weights.items())
