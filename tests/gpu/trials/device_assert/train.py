"""Looks up an index that the embedding does not have: a kernel fails, and Python learns of it later."""

import torch

embedding = torch.nn.Embedding(10, 4).cuda()
for step in range(5):
    vectors = embedding(torch.tensor([step * 3], device="cuda"))
    vectors.sum().backward()
    print("step", step, flush=True)
print("sum", float(vectors.sum()))
