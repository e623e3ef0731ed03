"""A script without a fault; its requirements have one."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cloudtrain_runtime import checkpoint, report

STEPS = 48

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
start = checkpoint.load(model=model, optimizer=optimizer).step
for step in range(start + 1, STEPS + 1):
    time.sleep(0.05)  # fast steps would end before a stop
    loss = F.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    checkpoint.save(step, model=model, optimizer=optimizer, force=step == STEPS)
    report(step, STEPS, loss=loss.item())
    if checkpoint.should_stop():
        break
dist.destroy_process_group()
