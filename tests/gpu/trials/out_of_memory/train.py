"""Allocates more and more memory of the GPU, of which it may use a small part only."""

import torch

torch.cuda.set_per_process_memory_fraction(0.05)
kept = []
for step in range(1, 10_000):
    kept.append(torch.zeros(2**26, device="cuda"))
    print("step", step, "loss", 1 / step, flush=True)
