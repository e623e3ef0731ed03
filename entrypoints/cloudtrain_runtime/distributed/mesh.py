"""The grid of ranks: pipeline x replicate x shard x tensor.

Tensor ranks communicate within each layer, so they are adjacent ranks of one host; pipeline ranks communicate least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.data import ReaderShare
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.run_context import Context

DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks, and this rank's position in it."""

    context: Context
    pipeline: int = 1  # number of pipeline ranks
    replicate: int = 1  # number of replicas of the model, or of a stage
    shard: int = 1  # ranks that shard one replica
    tensor: int = 1  # ranks that share each layer
    is_sharded: bool = (
        False  # whether FSDP shards parameters over `shard`, even if that is one rank
    )

    @classmethod
    def of(cls, config: ParallelConfig, context: Context) -> Mesh:
        """Return the grid of a job; raise a JobError if the sizes do not divide the number of ranks."""
        group = config.group_size
        if context.world_size % group:
            raise JobError(
                f"train.parallel: tensor {config.tensor} x pipeline {config.pipeline} does not divide the "
                f"{context.world_size} ranks"
            )
        data = context.world_size // group
        shard = (config.shard or data) if config.data == "fsdp" else 1
        if data % shard:
            raise JobError(f"train.parallel.shard: {shard} does not divide the {data} data ranks")
        # DDP cannot replicate layers that are split into DTensors; FSDP with a shard size of 1 can.
        is_sharded = config.data == "fsdp" or (config.tensor > 1 and data > 1)
        return cls(context, config.pipeline, data // shard, shard, config.tensor, is_sharded)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by name."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds and computes the full model."""
        return self.pipeline == self.tensor == 1 and not self.is_sharded

    @property
    def stage(self) -> int:
        """Index of this rank in its pipeline."""
        return self.context.rank // (self.context.world_size // self.pipeline)

    @property
    def tensor_rank(self) -> int:
        """Index of this rank among those that share its layers."""
        return self.context.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the samples. Ranks of one tensor group or one pipeline have the same share."""
        return self.context.rank // self.tensor % self.data_size

    @property
    def data_size(self) -> int:
        """Number of shares that the samples are divided into."""
        return self.replicate * self.shard

    @property
    def data_share(self) -> ReaderShare:
        """This rank's share of the samples."""
        return ReaderShare(self.data_rank, self.data_size)

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The grid as a DeviceMesh with all four dimensions. All ranks create it together, on first use."""
        shape = tuple(self.sizes.values())
        return init_device_mesh(self.context.device.type, shape, mesh_dim_names=DIMENSIONS)

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """Return the process group of this rank along a dimension; None if its size is 1."""
        return self.device_mesh.get_group(dimension) if self.sizes[dimension] > 1 else None

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The process group of the data ranks, which hold the same part of the model; None for one rank."""
        if self.data_size == 1:
            return None
        if self.data_size == self.context.world_size:
            return dist.group.WORLD
        if 1 in (self.replicate, self.shard):
            return self.group("shard" if self.replicate == 1 else "replicate")
        order = sorted(
            DIMENSIONS, key=("replicate", "shard").__contains__
        )  # the two data dimensions last
        ranks = self.device_mesh.mesh.permute([DIMENSIONS.index(name) for name in order])
        members = ranks.reshape(-1, self.data_size).tolist()
        found: list[dist.ProcessGroup] = [dist.new_group(each) for each in members]
        return next(group for group in found if dist.get_rank(group) >= 0)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks with the same weights or shards; None if there is one replica.

        All ranks use it together.
        """
        return self.data_group if self.shard == 1 else self.group("replicate")

    @property
    def weight(self) -> float:
        """Factor from a sum over all ranks to a mean over data ranks; only the last pipeline stages contribute."""
        return self.pipeline / self.context.world_size

    def mean(self, share: torch.Tensor) -> torch.Tensor:
        """Return the mean over the data ranks of a scalar of the last pipeline stages, on every rank."""
        total = share.detach().clone()
        if self.context.world_size > 1:
            dist.all_reduce(total)
        return total * self.weight

    def count_parameters(self, model: nn.Module) -> int:
        """Return the number of parameters of all stages."""
        own = sum(parameter.numel() for parameter in model.parameters())
        if self.pipeline == 1:
            return own
        total = torch.tensor(own)
        dist.all_reduce(total)
        return int(total) * self.pipeline // self.context.world_size

    @torch.no_grad()
    def share_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of the first data rank to the others.

        During training each rank has its own batch-norm statistics; the model that is evaluated, saved and exported
        must be the same on all ranks.
        """
        self.share(model.buffers())

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors without gradients of the first data rank to the others, in place."""
        group = self.data_group
        if group is None:
            return
        first = dist.get_global_rank(group, 0)
        for tensor in tensors:
            contiguous = tensor.contiguous()  # a transposed tensor cannot be broadcast
            dist.broadcast(contiguous, src=first, group=group)
            if contiguous is not tensor:
                tensor.copy_(contiguous)
