"""Ranks train one model: parameters that are unfrozen later, or unused by a rank; weights that differ are found."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.parallel_training import ADAM_SHIFT, SIX_DIGITS, TRAIN, Outcome, Small, losses
from support.replicas import Branched, Planted, Thawing, ThawingInLoss

from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig, TrainConfig
from cloudtrain_runtime.distributed.replica_check import checksums

pytestmark = pytest.mark.processes

DDP, FSDP = ParallelConfig(), ParallelConfig(data="fsdp")
STEPS = 4
JOB = replace(TRAIN, steps=STEPS, batch_size=6, accumulate=2)
"""The job of one process; `train` divides its batch size by the number of ranks."""


def train(
    task: type[Small], ranks: int, folder: Path, job: TrainConfig, **arguments: object
) -> Outcome:
    return losses(
        replace(job, batch_size=job.batch_size // ranks),
        ranks,
        folder,
        task=task,
        arguments=arguments,
        checkpoint=CheckpointConfig((folder / "checkpoints").as_uri(), None, 1, 2, "auto"),
        dtype=torch.float64,
    )


def check_like_one_process(task: type[Small], ranks: int, job: TrainConfig, folder: Path) -> None:
    """Check that several ranks, stopped in the middle and resumed, train as one process does."""
    alone = train(task, 1, folder / "alone", replace(job, parallel=DDP))
    first = train(task, ranks, folder / "several", replace(job, steps=2))
    rest = train(task, ranks, folder / "several", job)
    assert alone.reason is first.reason is rest.reason is None, first.text + rest.text
    assert [*first.losses, *rest.losses] == pytest.approx(alone.losses, rel=SIX_DIGITS)
    assert rest.weights is not None
    assert alone.weights is not None
    for name, value in rest.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=0, atol=STEPS * ADAM_SHIFT)


@pytest.mark.parametrize(("ranks", "parallel"), [(3, DDP), (2, FSDP)], ids=["ddp", "fsdp"])
def test_parameters_unfrozen_later_are_averaged(
    ranks: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    check_like_one_process(Thawing, ranks, replace(JOB, parallel=parallel), tmp_path)


def test_unfreezing_in_the_loss_is_an_error(tmp_path: Path) -> None:
    found = train(ThawingInLoss, 2, tmp_path, JOB)
    assert found.reason is not None
    assert re.match(
        r"TaskError: .*replicas\.py:\d+:\d+  loss\(\) has changed requires_grad of embedding\.",
        found.reason,
    )


def test_a_parameter_without_gradient_is_named(tmp_path: Path) -> None:
    found = train(Branched, 2, tmp_path, JOB)
    assert found.reason is not None
    assert re.match(
        r"TaskError: the loss of this step does not depend on (branch.weight, branch.bias, )?spare\.weight, "
        r"spare\.bias, .* set train\.parallel\.find_unused: true",
        found.reason,
    )


def test_unused_parameters_can_be_found_in_each_step(tmp_path: Path) -> None:
    job = replace(JOB, parallel=ParallelConfig(find_unused=True))
    check_like_one_process(Branched, 3, job, tmp_path)


@pytest.mark.parametrize(
    ("fault", "ranks", "parallel", "name"),
    [
        ("bit", 3, DDP, "blocks.1.up.weight (on rank 2, unlike on most ranks)"),
        ("optimizer", 2, DDP, "head.1.weight."),
        ("bit", 4, ParallelConfig(data="fsdp", shard=2), "blocks.1.up.weight."),
        ("bit", 4, ParallelConfig(tensor=2), "blocks.1.up.weight."),
    ],
    ids=["bit", "own-optimizer", "shard", "tensor"],
)
def test_different_weights_are_found_at_the_next_save(
    fault: str, ranks: int, parallel: ParallelConfig, name: str, tmp_path: Path
) -> None:
    job = replace(JOB, batch_size=12, parallel=parallel)
    found = train(Planted, ranks, tmp_path, job, fault=fault)
    assert found.reason is not None
    start = "JobError: the weights of the ranks are not equal after step 2: "
    assert found.reason.startswith(start + name)
    assert "the newest one is of step 1." in found.reason
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-00000001"}


def test_a_buffer_that_differs_is_warned_of_once(tmp_path: Path) -> None:
    found = train(Planted, 3, tmp_path, replace(JOB, batch_size=12), fault="buffer")
    assert found.reason is None, found.text
    warnings = [line for line in found.text.splitlines() if "buffers of the model" in line]
    assert len(warnings) == 1
    assert "at step 2: scale (on rank 2, unlike on most ranks)." in warnings[0]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8]
)
def test_each_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5, dtype=dtype).t()
    before = checksums([tensor, torch.zeros(0)])
    data = tensor.t().reshape(-1).view(torch.uint8)
    for place in range(0, data.numel(), 3):
        data[place] ^= 1
        assert checksums([tensor])[0] != before[0]
        data[place] ^= 1
    assert checksums([tensor])[0] == before[0]
    assert before[1] == 0
