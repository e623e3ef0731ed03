"""Parts of this machine for local trials that run at the same time: CPU cores and GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from cloudtrain.backends.container.machine import share_gpus, visible_gpus
from cloudtrain.support.notebook.summary import count

_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class MachineShare:
    """CPU cores and GPUs of one local trial; no cores where the system cannot assign them."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]


def share_machine(parallel: int) -> tuple[MachineShare, ...]:
    """Return the share of each of the trials that run at the same time."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = tuple(str(cpu) for cpu in sorted(os.sched_getaffinity(0))) if has_affinity else ()
    parts = zip(share_gpus(cpus, parallel), share_gpus(visible_gpus(), parallel), strict=True)
    return tuple(MachineShare(tuple(map(int, cores)), gpus) for cores, gpus in parts)


def describe_shares(shares: tuple[MachineShare, ...]) -> str:
    """Return one sentence about what each trial gets."""
    first = shares[0]
    what = [count(len(first.gpus), "GPU")] if first.gpus else []
    what += [count(len(first.cpus), "CPU core")] if first.cpus else []
    is_shared = len({each.gpus or each.cpus for each in shares}) < len(shares)
    note = (
        "; several trials share them, because there are more trials than that" if is_shared else ""
    )
    if len(shares) == 1:
        return "one trial at a time uses all of this machine"
    return (
        f"{len(shares)} trials at a time, each with {' and '.join(what) or 'all CPU cores'}{note}"
    )


@contextlib.contextmanager
def limited_to(share: MachineShare | None) -> Iterator[None]:
    """Give the processes that are started in this block a share of the machine. None changes nothing."""
    if share is None:
        yield
        return
    cpus = os.sched_getaffinity(0) if share.cpus else None
    gpus = {name: value for name, value in os.environ.items() if name == _GPU_VARIABLE}
    try:
        if share.cpus:
            os.sched_setaffinity(0, share.cpus)
        if share.gpus:
            os.environ[_GPU_VARIABLE] = ",".join(share.gpus)
        yield
    finally:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        os.environ.pop(_GPU_VARIABLE, None)
        os.environ.update(gpus)
