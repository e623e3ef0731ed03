"""A script with its own loop under torchrun: DistributedDataParallel, progress reports and checkpoints."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime import GlobalOrderSampler, checkpoint, report

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()

# NCCL needs a GPU for each rank.
use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
if use_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if use_gpu else "gloo")

x = torch.linspace(-3, 3, 1024).unsqueeze(1)
sampler = GlobalOrderSampler(len(x), batch_size=16)
loader = DataLoader(TensorDataset(x, x.sin()), batch_sampler=sampler, generator=torch.Generator())
total = options.epochs * sampler.steps_per_epoch

torch.manual_seed(0)  # all ranks build the same model
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
)
optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

state = {"model": model, "optimizer": optimizer, "sampler": sampler}
checkpoint.load(**state)  # continues from the newest checkpoint, if there is one
is_stopping = False
while sampler.epoch < options.epochs and not is_stopping:
    batches = iter(loader)
    for step in sampler.schedule():  # the remaining steps of the epoch
        optimizer.zero_grad()
        for micro in step.micro_batches:
            inputs, targets = (part.to(device) for part in next(batches))
            loss = F.mse_loss(model(inputs), targets)
            # All samples of the step have the same weight, also if ranks have different numbers of samples.
            (loss * micro.count * sampler.world_size / step.samples).backward()
        optimizer.step()
        sampler.advance()
        report(sampler.step, total=total, loss=loss)
        checkpoint.save(sampler.step, **state, force=sampler.step == total)
        if is_stopping := checkpoint.should_stop():
            break

if dist.get_rank() == 0 and not is_stopping:
    torch.save(model.module.state_dict(), Path(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))
dist.destroy_process_group()
