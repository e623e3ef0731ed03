"""Queues hours of work on the GPU and waits for it."""

import torch

square = torch.randn(16_384, 16_384, device="cuda")
for step in range(100_000):
    square = square @ square
    if step < 3:
        print("step", step, flush=True)
torch.cuda.synchronize()
