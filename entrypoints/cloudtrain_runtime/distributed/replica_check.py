"""A check that the replicas of a model are equal, bit for bit, on all ranks that have one.

A weight that only one rank changes (by an optimizer of the Task, by data of that rank, by a flipped bit) makes the
ranks train different models, of which a checkpoint has only the first. Each rank sends 8 bytes per tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cloudtrain_runtime.distributed.ddp import shorten
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types as which the bytes of an element can be read, by their number."""

_WORD = 8


@dataclass(frozen=True)
class Difference:
    """Tensors that are not equal on all replicas."""

    names: list[str]
    ranks: list[int]  # with other values than most ranks; empty where no value has a majority

    def __str__(self) -> str:
        """Return the names, and the ranks that differ."""
        text = shorten(self.names)
        if self.ranks:
            text += f" (on rank {', '.join(map(str, self.ranks))}, unlike on most ranks)"
        return text


class ReplicaCheck:
    """Compares the replicas of a model at each save. All ranks call its method together."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._known: set[str] = set()

    def require_equal(self, step: int, newest: Callable[[], int | None]) -> None:
        """Raise a JobError if parameters differ between ranks, and warn of buffers that do.

        Buffers are no mistake: before each forward pass and each save, all ranks get those of the first one.

        Args:
            step: Optimizer steps done.
            newest: Returns the step of the newest complete checkpoint of this attempt; None without one. All ranks
                call it together.
        """
        found = self._compare(dict(self._model.named_parameters()))
        if found is not None:
            last = newest()
            left = "" if last is None else f", and the newest one is of step {last}"
            raise JobError(
                f"the weights of the ranks are not equal after step {step}: {found}. The ranks train different models, "
                f"so no checkpoint of this step is saved{left}. Does the Task step an optimizer of its own, or change "
                "weights by data of its rank, in loss() or after_step()? Average over the ranks there. If it does not, "
                "suspect the memory of a host, and resume from that checkpoint",
                is_common=True,
            )
        buffers = self._compare(own_buffers(self._model))
        if buffers is None or self._known.issuperset(buffers.names):
            return
        self._known.update(buffers.names)
        if self._mesh.context.is_main:
            log_line(
                f"warning: buffers of the model are not equal on all ranks at step {step}: {buffers}. Each forward "
                "pass, evaluation and checkpoint uses those of the first rank"
            )

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> Difference | None:
        mesh = self._mesh
        return compare(tensors, mesh.replica_group, mesh.context, has_all_ranks=mesh.is_plain)


class ScriptReplicaCheck:
    """Compares the replicas of a script's DistributedDataParallel modules at each save, and warns."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: set[str] = set()

    def warn(self, model: nn.Module, step: int) -> None:
        """Log the parameters that differ between ranks, once for each. All ranks call this together.

        A script may average its weights in a way of its own, so this is no error.
        """
        for replica in model.modules():
            if not isinstance(replica, DistributedDataParallel):
                continue
            ignored = set(replica.parameters_to_ignore)
            tensors = {
                name: each
                for name, each in replica.module.named_parameters()
                if name not in ignored
            }
            size = dist.get_world_size(replica.process_group)
            found = compare(
                tensors,
                replica.process_group,
                self._context,
                has_all_ranks=size == self._context.world_size,
            )
            if found is None or self._known.issuperset(found.names):
                continue
            self._known.update(found.names)
            if self._context.is_main:
                log_line(
                    f"warning: the weights of the ranks are not equal at step {step}: {found}. The checkpoint has those "
                    "of rank 0. DistributedDataParallel averages gradients only of parameters that were trainable when it "
                    "was created"
                )


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not the statistics of batch norm, which differ by the samples of each rank."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        if not hasattr(module, "track_running_stats")
        for name, buffer in module.named_buffers(recurse=False)
    }


@torch.no_grad()
def compare(
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    context: Context,
    *,
    has_all_ranks: bool,
) -> Difference | None:
    """Return which tensors are not equal on all replicas; None if all are. All ranks of the run call this together.

    Shards are compared with the same shards of the other replicas.

    Args:
        tensors: This rank's tensors by name.
        group: The ranks whose tensors have to be equal to this rank's; None for this rank alone.
        context: The context of this rank.
        has_all_ranks: Whether the group has all ranks of the run.
    """
    if group is None:
        return None
    names = list(tensors)
    sums = checksums(tensors.values())
    # One reduction gives the largest and, by the complement, the smallest value.
    extremes = torch.stack([sums, ~sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    is_different = extremes[0] != ~extremes[1]
    # Of all ranks, because all of them have to act alike.
    if not any(gather(bool(is_different.any()), context)):
        return None
    own = [name for name, differs in zip(names, is_different.tolist(), strict=True) if differs]
    sums_by_rank = gather(tuple(sums[is_different].tolist()), context)
    different = list(dict.fromkeys(name for each in gather(own, context) for name in each))
    return Difference(different, _minority(sums_by_rank) if has_all_ranks else [])


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
