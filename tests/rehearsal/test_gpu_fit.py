"""What would fit a GPU: the arithmetic, and the errors of PyTorch. No GPU is needed, and none has been used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.parallel_training import TRAIN

from cloudtrain.features.rehearsal.gpu_fit import (
    OutOfMemory,
    fits,
    needs_cpu,
    parse_out_of_memory,
    smaller_batch,
    variants,
)
from cloudtrain.features.rehearsal.rank_memory import RankMemory
from cloudtrain_runtime.contract import ParallelConfig

MIB, GIB = 2**20, 2**30
MEMORY = RankMemory(100, 100, 200, 0, 40, 10)
"""400 bytes of state; activations of 40 bytes and 10 per sample."""


def test_the_batch_shrinks_to_a_divisor_that_fits() -> None:
    """Of 1,000 bytes 900 count: 460 for samples, so 46 would fit, and 32 is the largest divisor of 64 below it."""
    found = smaller_batch(MEMORY, replace(TRAIN, batch_size=64, accumulate=3), 1_000)
    assert found is not None
    assert (found.train.batch_size, found.train.accumulate) == (32, 6)
    assert found.change == "train.batch_size=32 and train.accumulate=6"
    assert fits(MEMORY, 46, 1_000)
    assert not fits(MEMORY, 47, 1_000)


def test_no_batch_fits_where_the_state_does_not() -> None:
    assert smaller_batch(MEMORY, replace(TRAIN, batch_size=64), 440) is None


def test_the_update_counts_where_it_needs_more_than_activations() -> None:
    assert MEMORY.peak_bytes(1) == 400 + 100
    assert MEMORY.peak_bytes(10) == 400 + 140


def test_changes_are_those_that_the_job_does_not_have() -> None:
    assert [each.change for each in variants(TRAIN, 4)] == [
        "train.precision=bf16",
        "train.activation_checkpointing=true",
        "train.parallel.data=fsdp",
        "train.parallel.data=fsdp and train.activation_checkpointing=true",
    ]
    small = replace(
        TRAIN, precision="bf16", activation_checkpointing=True, parallel=ParallelConfig(data="fsdp")
    )
    assert list(variants(small, 4)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
                "22.06 GiB of which 1.12 GiB is free. Process 7 has 20.94 GiB memory in use."
            ),
            OutOfMemory(round(2.5 * GIB), round(22.06 * GIB), round(1.12 * GIB)),
        ),
        (
            (
                "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 6.00 GiB total capacity; "
                "4.54 GiB already allocated; 14.94 MiB free; 4.64 GiB reserved in total by PyTorch)"
            ),
            OutOfMemory(20 * MIB, 6 * GIB, round(14.94 * MIB)),
        ),
        ("CUDA out of memory. Tried to allocate 512 bytes", OutOfMemory(512, None, None)),
        ("RuntimeError: CUDA error: device-side assert triggered", None),
    ],
)
def test_out_of_memory_errors_are_read(text: str, found: OutOfMemory | None) -> None:
    assert parse_out_of_memory(f"step 3\n[rank0]: {text}\nmore\n") == found


def test_sharded_ranks_leave_a_shared_gpu_alone() -> None:
    """Gloo has no all-gather for tensors of a GPU, so that ranks that share one can use it with DDP only."""
    sharded = replace(TRAIN, parallel=ParallelConfig(data="fsdp"))
    assert [needs_cpu(sharded, 2, gpus) for gpus in (0, 1, 2)] == [False, True, False]
    assert not needs_cpu(TRAIN, 2, 1)
    assert not needs_cpu(None, 2, 1)
