"""The process group of all ranks, and agreement between them at step boundaries."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed documents it, but lacks it in torch 2.5.
from torch._C._distributed_c10d import HashStore

from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.run_context import Context

SMDDP_FRAMEWORK = "2.5"
SMDDP_IMAGE = "pytorch-training:2.5.1-gpu-py311-cu124-ubuntu22.04-sagemaker"
"""The newest of AWS's images with SMDDP. Source: AWS's list of Deep Learning Containers, 2026-11."""

_START_SECONDS = 1800
"""Timeout of the rendezvous and of each collective."""

_LISTENER_SECONDS = 30.0
"""How long a rank polls for the store of rank 0. After that torch connects with its own back-off and timeout."""

_FIRST_PAUSE_SECONDS = 0.002
_MAX_PAUSE_SECONDS = 0.05

_PACE_SECONDS = 0.05
"""Minimum time between two messages: on busy cores each costs half a millisecond."""

_MAX_BOUNDARIES = 16
"""Maximum number of step boundaries between two messages: steps may slow down, and a stop notice leaves 120 s."""


def join_ranks(context: Context) -> None:
    """Initialize the process group of all ranks, for the lifetime of this process.

    Nothing destroys it: torch 2.5's Gloo can deadlock on destruction (it waits for a thread that waits for the
    interpreter's lock), and a worker exits without the interpreter's shutdown anyway.
    """
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    if context.backend == "smddp":
        _register_smddp()
    # CPU tensors (flags, gathered objects, checkpoint plans) always use Gloo.
    backend = "gloo" if context.backend == "gloo" else f"cpu:gloo,cuda:{context.backend}"
    timeout = timedelta(seconds=_START_SECONDS)
    if context.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if context.rank > 0:
        wait_for_listener(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _LISTENER_SECONDS
        )
    dist.init_process_group(
        backend, rank=context.rank, world_size=context.world_size, timeout=timeout
    )


def wait_for_listener(host: str, port: int, timeout_seconds: float) -> bool:
    """Wait until a process listens at an address, up to a timeout in seconds; return whether one does.

    Rank 0 opens the store through which the ranks find each other. A rank that connects earlier is refused, and torch
    retries after 0.4 to 0.8 s (measured with torch 2.13). Forked workers connect within milliseconds of each other, so
    half of all starts and restarts would incur that delay.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError:
            # The host refuses the connection, or its name does not resolve yet.
            if time.monotonic() + pause >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        else:
            return True


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


def gather(value: Any, context: Context, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    if context.world_size == 1:
        return [value]
    values: list[Any] = [None] * context.world_size
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class Row:
    """Numbers of this rank that are exchanged with all other ranks."""

    # as many as `Agreement` was created with, on each rank
    numbers: Sequence[float]
    # callback that receives the rows of all ranks in rank order; called on every rank
    take: Callable[[list[list[float]]], None]


class Agreement:
    """Flags that any rank can raise and all ranks see at the same step boundary, with numbers in the same message.

    A message that is sent at one boundary is read at the next, so no rank waits for it: a step costs one small message
    on the CPU and no device synchronization. When boundaries follow each other quickly, only every second to sixteenth
    sends a message; the ranks agree on the interval in the message itself.

    Args:
        numbers: How many numbers a `Row` has.
    """

    def __init__(self, context: Context, flags: int, numbers: int = 0) -> None:
        self._size = context.world_size
        self._silent = (False,) * flags
        self._no_numbers = (0.0,) * numbers
        # A separate group: these messages must not queue behind gradients.
        self.group = dist.new_group(backend="gloo") if self._size > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work, Row | None] | None = None
        self._flags_seen = self._silent
        self._asked_at = time.monotonic()
        # The number of boundaries since the last message.
        self._boundaries = 0
        self._every = 1

    def at_boundary(
        self, ask: Callable[[], tuple[bool, ...]], row: Row | None = None
    ) -> tuple[bool, ...]:
        """Return the flags that any rank raised a few boundaries ago; with one rank, its present flags.

        Args:
            ask: Returns this rank's flags. Called when a message is sent.
            row: Sent at once; all ranks must pass one at the same boundaries. The rows of all ranks are delivered at
                this boundary, or at the next one when steps are fast.
        """
        if self.group is None:
            if row is not None:
                row.take([[*row.numbers]])
            return ask()
        self.poll()
        self._boundaries += 1
        if row is not None or self._boundaries >= self._every:
            now = time.monotonic()
            seconds = (now - self._asked_at) / self._boundaries
            proposed = min(_MAX_BOUNDARIES, max(1, int(_PACE_SECONDS / max(seconds, 1e-9))))
            self._asked_at = now
            self._boundaries = 0
            flags = ask()
            numbers = self._no_numbers if row is None else row.numbers
            self._send((*flags, proposed, *numbers), row)
            if row is not None and self._every == 1:
                self.poll()
        seen = self._flags_seen
        self._flags_seen = self._silent
        return seen

    def poll(self, *, wait: bool = True) -> None:
        """Receive the pending message, if it has arrived or with `wait`: rows now, flags at the next boundary."""
        if self._pending is None:
            return
        received, work, row = self._pending
        if not (wait or work.is_completed()):
            return
        self._pending = None
        work.wait()
        rows: list[list[float]] = received.tolist()
        flags = len(self._flags_seen)
        self._flags_seen = tuple(
            before or any(of) for before, *of in zip(self._flags_seen, *rows, strict=False)
        )
        # The mean of the intervals that the ranks propose. The sum of integers is exact, so all
        # ranks compute the same.
        self._every = max(1, round(sum(each[flags] for each in rows) / self._size))
        if row is not None:
            row.take([each[flags + 1 :] for each in rows])

    def _send(self, numbers: tuple[float, ...], row: Row | None) -> None:
        # Each rank combines the flags itself: an all-gather takes half the hops of an all-reduce.
        received = torch.empty(self._size, len(numbers), dtype=torch.float64)
        own = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_gather(list(received.unbind()), own, group=self.group, async_op=True)
        if work is not None:
            self._pending = (received, work, row)
