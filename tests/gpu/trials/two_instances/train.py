"""Sums over two instances as scripts for NCCL do, also where both instances share one card."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
total = torch.ones(4, device="cuda")
dist.all_reduce(total)
print(f"rank {dist.get_rank()} sum {total[0].item():.0f}", flush=True)
dist.destroy_process_group()
