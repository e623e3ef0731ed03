"""A script with a sharded model, of which only rank 0 saves its shards."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from cloudtrain_runtime import report

STEPS = 48

path = Path(sys.argv[1], "model.pt")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Linear(8, 8)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
start = 0
if path.is_file():
    saved = torch.load(path, weights_only=False)
    start = saved["step"]
    model.load_state_dict(saved["model"])
inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
for step in range(start + 1, STEPS + 1):
    time.sleep(0.05)  # fast steps would end before a stop
    loss = F.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report(step, STEPS, loss=loss.item())
    if dist.get_rank() == 0 and step % 2 == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "model": model.state_dict()}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
dist.destroy_process_group()
