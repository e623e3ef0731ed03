"""In the style of the FSDP tutorials: FullyShardedDataParallel with mixed precision, then fully_shard on a mesh."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard


def train(name: str, model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs = torch.randn(32, 8, generator=torch.Generator("cuda").manual_seed(rank), device="cuda")
    for _ in range(15):
        optimizer.zero_grad()
        loss = (model(inputs).float() - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        print(f"{name} loss {mean.item():.4f}", flush=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.cuda.set_device(rank)
    half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    precision = MixedPrecision(param_dtype=half, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(
        network(), device_id=torch.cuda.current_device(), mixed_precision=precision
    )
    train("fsdp", model, rank)
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("data",))
    sharded = network().to(f"cuda:{rank}")
    fully_shard(sharded, mesh=mesh)
    train("fully_shard", sharded, rank)
    torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
