"""A script that loads and saves its checkpoints, and ignores SIGTERM."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cloudtrain_runtime import report

STEPS = 6000

signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
path = Path(os.environ.get("CLOUDTRAIN_ML_ROOT", "/opt/ml"), "checkpoints", "last.pt")
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 1
if path.is_file():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    first = saved["step"] + 1
inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
for step in range(first, STEPS + 1):
    time.sleep(0.05)
    loss = F.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0 and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "step": step}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    report(step, STEPS, loss=loss.item())
