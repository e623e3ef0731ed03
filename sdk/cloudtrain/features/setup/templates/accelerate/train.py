"""A loop with Accelerate that is attached to the run: progress, checkpoints, stops and resumes."""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime.integrations.accelerate import attach

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()

# Without cpu=True, Accelerate trains each rank alone if there are no GPUs.
accelerator = Accelerator(cpu=not torch.cuda.is_available())
x = torch.linspace(-3, 3, 1024).unsqueeze(1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=16, shuffle=True)

torch.manual_seed(0)  # all ranks build the same model
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=options.lr)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

# Continues from the newest checkpoint, if there is one.
loop = attach(accelerator, model, total_steps=options.epochs * len(loader))
for _ in loop.epochs(options.epochs):
    for inputs, targets in loop.batches(loader):
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loop.report(loss=loss)

if accelerator.is_main_process and not loop.is_stopped:
    weights = accelerator.unwrap_model(model).state_dict()
    torch.save(weights, Path(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))
accelerator.end_training()
