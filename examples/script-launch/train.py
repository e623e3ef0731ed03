"""DDP with `python -m torch.distributed.launch`, which passes --local_rank to each process.

The script does not import cloudtrain.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train a classifier of handwritten digits and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    use_gpu = torch.cuda.device_count() > args.local_rank
    device = torch.device("cuda", args.local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl" if use_gpu else "gloo", init_method="env://")

    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    model = DistributedDataParallel(net, device_ids=[args.local_rank] if use_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        folder = os.environ.get("SM_MODEL_DIR", ".")
        torch.save(net.state_dict(), os.path.join(folder, "model.pt"))
        print(f"world size {dist.get_world_size()}: saved {folder}/model.pt", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
