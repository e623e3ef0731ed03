"""A script with a loop of its own, which saves with `cloudtrain_runtime.checkpoint`."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from cloudtrain_runtime import checkpoint, context, report

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
steps = parser.parse_args().steps

torch.manual_seed(3)
model = nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
resumed = checkpoint.load(model=model, optimizer=optimizer)
for step in range(resumed.step + 1, steps + 1):
    loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report(step, loss=loss.item())
    checkpoint.save(
        step,
        model=model,
        optimizer=optimizer,
        state={"loss": loss.item()},
        force=step == steps,
    )
torch.save(model.state_dict(), context().model_dir / "model.pt")
