"""A workaround for a hang in the destructor of Gloo process groups.

The destructor waits for the group's thread while it holds the interpreter's lock, and that thread waits for the lock
after its last collective. A script that destroys its group right after the last step, and then returns from the
function that holds the DDP model, may therefore never end. Observed with torch 2.13 in two of two runs with forked
workers, and in none of five runs under plain torchrun, which uses the same code of torch.
"""

from __future__ import annotations

import sys
from typing import Any

_kept: list[Any] = []


def keep_gloo_groups() -> None:
    """Make `destroy_process_group` keep a reference to each Gloo group, so that no destructor runs before the exit.

    It applies only where torch is imported already, as in every forked worker: some scripts set variables that torch
    reads at import.
    """
    found = sys.modules.get("torch.distributed.distributed_c10d")
    if found is None or not hasattr(found, "destroy_process_group"):
        return
    distributed: Any = found
    destroy = distributed.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        _kept.extend(_gloo_backends(distributed))
        destroy(group)

    destroy_process_group.__doc__ = destroy.__doc__
    public: Any = sys.modules["torch.distributed"]
    distributed.destroy_process_group = public.destroy_process_group = destroy_process_group


def _gloo_backends(distributed: Any) -> list[Any]:
    """Return this process's Gloo groups, without those of other backends that belong to the same group."""
    import torch

    cpu = torch.device("cpu")
    groups = list(distributed._world.pg_map)  # noqa: SLF001 (there is no public list of them)
    with_cpu = [group for group in groups if cpu in group._device_types]  # noqa: SLF001
    return [group._get_backend(cpu) for group in with_cpu]  # noqa: SLF001
