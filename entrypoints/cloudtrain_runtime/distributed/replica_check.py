"""A check that the replicas of a model are equal, bit for bit, on all ranks that have one.

A weight that only one rank changes (by an optimizer of the Task, by data of that rank, by a flipped bit) makes the
ranks train different models, of which a checkpoint has only the first. Each rank sends 8 bytes per tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from cloudtrain_runtime.distributed.ddp import shorten
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.process_group import gather

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types as which the bytes of an element can be read, by their number."""

_WORD = 8


def require_equal_replicas(
    model: nn.Module, mesh: Mesh, step: int, newest: Callable[[], int | None]
) -> None:
    """Raise a JobError if the parameters of a model differ between its replicas. All ranks call this together.

    Args:
        model: The model.
        mesh: The grid of ranks.
        step: Optimizer steps done.
        newest: Returns the step of the newest complete checkpoint of this attempt; None without one. All ranks
            call it together.
    """
    found = _compare(dict(model.named_parameters()), mesh)
    if found is None:
        return
    last = newest()
    left = "" if last is None else f", and the newest one is of step {last}"
    raise JobError(
        f"the weights of the ranks are not equal after step {step}: {found}. The ranks train different models, "
        f"so no checkpoint of this step is saved{left}. Does the Task step an optimizer of its own, or change "
        "weights by data of its rank, in loss() or after_step()? Average over the ranks there. If it does not, "
        "suspect the memory of a host, and resume from that checkpoint",
        is_common=True,
    )


@torch.no_grad()
def _compare(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> str | None:
    """Return which tensors are not equal on all replicas, and on which ranks; None if all are equal.

    Shards are compared with the same shards of the other replicas.
    """
    group = mesh.replica_group
    if group is None:
        return None
    names = list(tensors)
    sums = checksums(tensors.values())
    # One reduction gives the largest and, by the complement, the smallest value.
    extremes = torch.stack([sums, ~sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    is_different = extremes[0] != ~extremes[1]
    # Of all ranks, because all of them have to act alike.
    if not any(gather(bool(is_different.any()), mesh.context)):
        return None
    own = [name for name, differs in zip(names, is_different.tolist(), strict=True) if differs]
    sums_by_rank = gather(tuple(sums[is_different].tolist()), mesh.context)
    different = dict.fromkeys(name for each in gather(own, mesh.context) for name in each)
    found = shorten(list(different))
    ranks = _minority(sums_by_rank) if mesh.is_plain else []
    if ranks:
        found += f" (on rank {', '.join(map(str, ranks))}, unlike on most ranks)"
    return found


def _minority(values: Iterable[object]) -> list[int]:
    """Return the positions of values that differ from the value that more than half have; none without one."""
    values = list(values)
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return []
    return [at for at, each in enumerate(values) if each != value]


def checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each tensor's elements, read as integers: int64 on the CPU. A flipped bit changes it."""
    sums = [_checksum(each.to_local() if isinstance(each, DTensor) else each) for each in tensors]
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    device = sums[0].device
    return torch.stack([each.to(device) for each in sums]).cpu()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() * flat.element_size() % _WORD:
        return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
    # Words of 8 bytes take a sixth of the time. They have to begin at a multiple of 8.
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    return flat.view(torch.int64).sum()
