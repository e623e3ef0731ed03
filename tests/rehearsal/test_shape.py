"""The hosts and ranks of a rehearsal."""

from __future__ import annotations

from dataclasses import replace

from support.parallel_training import TRAIN

from cloudtrain.features.rehearsal.shape import needs_cpu
from cloudtrain_runtime.contract import ParallelConfig


def test_sharded_ranks_leave_a_shared_gpu_alone() -> None:
    """Gloo has no all-gather for tensors of a GPU, so that ranks that share one can use it with DDP only."""
    sharded = replace(TRAIN, parallel=ParallelConfig(data="fsdp"))
    assert [needs_cpu(sharded, 2, gpus) for gpus in (0, 1, 2)] == [False, True, False]
    assert not needs_cpu(TRAIN, 2, 1)
    assert not needs_cpu(None, 2, 1)
