"""A process group of one rank, for tests in this process. Separate from `support.jobs`, which must not import torch."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

import torch.distributed as dist

from cloudtrain_runtime.process.process_group import join_ranks
from cloudtrain_runtime.process.run_context import Context


@contextlib.contextmanager
def process_group(context: Context) -> Iterator[None]:
    """Join a process group and leave it at the end. Workers never leave; tests leave so that they can join again."""
    join_ranks(context)
    try:
        yield
    finally:
        # In torch 2.5, Gloo deadlocks if one of its threads still holds a tensor. Its threads finish first.
        gc.collect()
        time.sleep(0.05)
        dist.destroy_process_group()
