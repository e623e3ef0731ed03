"""A script with a different model on each rank, of which only that of rank 0 is saved."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cloudtrain_runtime import report

STEPS = 60

path = Path(sys.argv[1], "expert.pt")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
expert = nn.Linear(3, 1)  # each rank trains an expert of its own
start = 0
if path.is_file():
    saved = torch.load(path, weights_only=True)
    start = saved["step"]
    if rank == 0:
        expert.load_state_dict(saved["expert"])
optimizer = torch.optim.SGD(expert.parameters(), lr=0.1)
inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
for step in range(start + 1, STEPS + 1):
    time.sleep(0.25)  # each step is reported, and none is too fast to be stopped
    loss = F.mse_loss(expert(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    report(step, STEPS, loss=mean.item() / dist.get_world_size())
    if rank == 0 and step % 2 == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "expert": expert.state_dict()}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
dist.destroy_process_group()
