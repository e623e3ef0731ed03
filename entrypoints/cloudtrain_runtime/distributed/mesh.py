"""The ranks as a grid: pipeline x replicate x shard x tensor, the last one next to each other.

Tensor ranks talk within each layer, so they are neighbours on one host; pipeline ranks talk least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.run_context import Context

DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks, and where this one stands.

    Attributes:
        place: This rank's place.
        pipeline: Ranks that hold the layers one after the other.
        replicate: Copies of the model (of a stage).
        shard: Ranks that hold one copy together.
        tensor: Ranks that share each layer.
        is_sharded: Whether parameters are spread over `shard`, be it one rank.
    """

    place: Context
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    is_sharded: bool = False

    @classmethod
    def of(cls, config: ParallelConfig, place: Context) -> Mesh:
        """Return the grid that a job asks for.

        Raises:
            JobError: it does not fit the ranks.
        """
        group = config.pipeline * config.tensor
        if place.world_size % group:
            raise JobError(
                f"train.parallel: tensor {config.tensor} x pipeline {config.pipeline} does not divide the "
                f"{place.world_size} ranks"
            )
        data = place.world_size // group
        shard = (config.shard or data) if config.data == "fsdp" else 1
        if data % shard:
            raise JobError(f"train.parallel.shard: {shard} does not divide the {data} data ranks")
        # Replicas of layers that are split are shards on one rank each: DDP cannot hold them.
        is_sharded = config.data == "fsdp" or (config.tensor > 1 and data > 1)
        return cls(place, config.pipeline, data // shard, shard, config.tensor, is_sharded)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension, for people and for the manifest."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model, and computes it alone."""
        return self.pipeline == self.tensor == 1 and not self.is_sharded

    @property
    def stage(self) -> int:
        """Index of this rank in its pipeline."""
        return self.place.rank // (self.place.world_size // self.pipeline)

    @property
    def tensor_rank(self) -> int:
        """Index of this rank among those that share its layers."""
        return self.place.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank sees. Ranks of one tensor group or one pipeline see the same."""
        return self.place.rank // self.tensor % self.data_size

    @property
    def data_size(self) -> int:
        """Into how many shares the samples go."""
        return self.replicate * self.shard

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The grid as torch has it, with all four dimensions by name. Made on first use, by all ranks together."""
        shape = tuple(self.sizes.values())
        return init_device_mesh(self.place.device.type, shape, mesh_dim_names=DIMENSIONS)

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one in a dimension only; None where it is the only one."""
        return self.device_mesh.get_group(dimension) if self.sizes[dimension] > 1 else None

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model, or shards of it; None where this one does alone."""
        if self.data_size == 1:
            return None
        if self.data_size == self.place.world_size:
            return dist.group.WORLD
        if 1 in (self.replicate, self.shard):
            return self.group("shard" if self.replicate == 1 else "replicate")
        return self.device_mesh["replicate", "shard"]._flatten("data").get_group()  # noqa: SLF001 (it has no public name)

    @property
    def weight(self) -> float:
        """What makes the mean over the data ranks of the sum over all ranks, where pipelines tell it at their end."""
        return self.pipeline / self.place.world_size

    def mean(self, share: torch.Tensor) -> torch.Tensor:
        """Return the mean over the data ranks of a scalar that lies on each pipeline's last stage, on every rank."""
        total = share.detach().clone()
        if self.place.world_size > 1:
            dist.all_reduce(total)
        return total * self.weight

    def count_parameters(self, model: nn.Module) -> int:
        """Return the number of parameters of all stages together."""
        own = sum(parameter.numel() for parameter in model.parameters())
        if self.pipeline == 1:
            return own
        total = torch.tensor(own)
        dist.all_reduce(total)
        return int(total) * self.pipeline // self.place.world_size

    @torch.no_grad()
    def share_buffers(self, model: nn.Module) -> None:
        """Give every data rank the buffers of the first one.

        Between steps each rank has its own batch-norm statistics. What is evaluated, saved and exported must be one
        model.
        """
        group = self.data_group
        if group is None:
            return
        first = dist.get_global_rank(group, 0)
        for buffer in model.buffers():
            whole = buffer.contiguous()  # what is transposed cannot be sent
            dist.broadcast(whole, src=first, group=group)
            if whole is not buffer:
                buffer.copy_(whole)
