"""An ordinary torchrun script: it knows nothing of cloudtrain.

It runs as `torchrun --nproc-per-node 2 train.py --epochs 3` too.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_iris
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train a classifier of iris flowers and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    torch.manual_seed(0)

    iris = load_iris()
    data = TensorDataset(torch.tensor(iris.data, dtype=torch.float32), torch.tensor(iris.target))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        folder = Path(os.environ.get("SM_MODEL_DIR", "."))
        torch.save(model.module.state_dict(), folder / "model.pt")
        print(f"world size {dist.get_world_size()}: saved {folder / 'model.pt'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
