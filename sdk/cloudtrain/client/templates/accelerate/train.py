"""A loop with Accelerate: progress reports, and checkpoints in place of its save_state and load_state."""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime import GlobalOrderSampler, checkpoint, report

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()

# Without cpu=True, Accelerate trains each rank alone if there are no GPUs.
accelerator = Accelerator(cpu=not torch.cuda.is_available())
x = torch.linspace(-3, 3, 1024).unsqueeze(1)
sampler = GlobalOrderSampler(len(x), batch_size=16)
# The sampler gives each rank its samples, so the loader is not passed to accelerator.prepare.
loader = DataLoader(TensorDataset(x, x.sin()), batch_sampler=sampler, generator=torch.Generator())
total = options.epochs * sampler.steps_per_epoch

torch.manual_seed(0)  # all ranks build the same model
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=options.lr))

state = {"model": model, "optimizer": optimizer, "sampler": sampler, "scaler": accelerator.scaler}
checkpoint.load(**state)  # continues from the newest checkpoint, if there is one
is_stopping = False
while sampler.epoch < options.epochs and not is_stopping:
    batches = iter(loader)
    for step in sampler.schedule():  # the remaining steps of the epoch
        optimizer.zero_grad()
        for micro in step.micro_batches:
            inputs, targets = (part.to(accelerator.device) for part in next(batches))
            loss = F.mse_loss(model(inputs), targets)
            # All samples of the step have the same weight, also if ranks have different numbers of samples.
            accelerator.backward(loss * micro.count * sampler.world_size / step.samples)
        optimizer.step()
        sampler.advance()
        report(sampler.step, total=total, loss=loss)
        checkpoint.save(sampler.step, **state, force=sampler.step == total)
        if is_stopping := checkpoint.should_stop():
            break

if accelerator.is_main_process and not is_stopping:
    weights = accelerator.unwrap_model(model).state_dict()
    torch.save(weights, Path(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))
accelerator.end_training()
