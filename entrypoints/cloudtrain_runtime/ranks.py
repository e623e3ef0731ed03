"""Ranks that work as one: the process group, and what all ranks must agree on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cloudtrain_runtime.context import Context
from cloudtrain_runtime.errors import JobError

SMDDP_FRAMEWORK = "2.5"
SMDDP_IMAGE = "pytorch-training:2.5.1-gpu-py311-cu124-ubuntu22.04-sagemaker"
"""The newest of AWS's images with SMDDP. Source: AWS's list of Deep Learning Containers, 2026-11."""

_START_SECONDS = 1800
"""How long the first rank waits for the last, and the longest single collective."""

_PACE_SECONDS = 0.005
_LEAST_OFTEN = 8
"""Step boundaries from one message to the next, at most: steps may become slow at once, and a notice gives 120 s."""


def join_ranks(place: Context) -> None:
    """Join the ranks to one process group, for the life of this process.

    Nothing destroys it: torch 2.5's Gloo can deadlock there (it waits for a thread that waits for the interpreter), and
    a worker leaves without the interpreter's shutdown anyway.
    """
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if place.backend == "smddp":
        _register_smddp()
    # CPU tensors (flags, object gathers, checkpoints' plans) always travel by Gloo.
    backend = "gloo" if place.backend == "gloo" else f"cpu:gloo,cuda:{place.backend}"
    timeout = timedelta(seconds=_START_SECONDS)
    if place.world_size > 1:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _register_smddp() -> None:
    """Import AWS's data-parallel library, which registers itself with torch as the backend `smddp`."""
    try:
        import smdistributed.dataparallel.torch.torch_smddp  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        raise JobError(
            f"AWS's SMDDP library cannot be imported in this image ({error}). The newest with it is AWS's container of "
            f'PyTorch {SMDDP_FRAMEWORK} ({SMDDP_IMAGE}): use framework: "{SMDDP_FRAMEWORK}", or distribution: '
            "torch_distributed, which works in every image"
        ) from error


def gather(value: Any, place: Context, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    if place.world_size == 1:
        return [value]
    values: list[Any] = [None] * place.world_size
    dist.all_gather_object(values, value, group=group)
    return values


class Agreement:
    """Flags that any rank may raise and all ranks see at the same step boundary.

    The all-reduce of one boundary is read at the next, so nobody waits for it: a step costs one small message on the
    CPU and no device synchronisation. Where boundaries come faster than the pace, only each second to eighth asks and
    sends: the ranks agree on that in the same message.
    """

    def __init__(self, place: Context, flags: int) -> None:
        self._place = place
        self._silent = (False,) * flags
        # A group of its own: it must not queue behind gradients.
        self.group = dist.new_group(backend="gloo") if place.world_size > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._asked_at = time.monotonic()
        self._boundaries = 0  # since then
        self._every = 1

    def at_boundary(self, ask: Callable[[], tuple[bool, ...]]) -> tuple[bool, ...]:
        """Return what all ranks together had raised a few boundaries ago; a single rank's flags are never old.

        Args:
            ask: Returns this rank's flags. Called where they are sent.
        """
        seen = self._silent if self._pending is None else self._finish(*self._pending)
        self._boundaries += 1
        if self._boundaries < self._every:
            return seen
        now = time.monotonic()
        seconds = (now - self._asked_at) / self._boundaries
        wished = min(_LEAST_OFTEN, max(1, int(_PACE_SECONDS / max(seconds, 1e-9))))
        self._asked_at, self._boundaries = now, 0
        if self.group is None:
            self._every = wished
            return ask()
        self._send(ask(), wished)
        return seen

    def _send(self, raised: tuple[bool, ...], wished: int) -> None:
        # The maximum of all: who wishes for messages most often has them.
        flags = torch.tensor((*raised, _LEAST_OFTEN - wished), dtype=torch.uint8)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        if work is not None:
            self._pending = (flags, work)

    def _finish(self, flags: torch.Tensor, work: dist.Work) -> tuple[bool, ...]:
        work.wait()
        self._pending = None
        *seen, left = flags.tolist()
        self._every = _LEAST_OFTEN - left
        return tuple(map(bool, seen))
