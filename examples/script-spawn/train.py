"""DDP without torchrun: the script runs once per host, and starts the ranks of this host itself.

It computes ranks from SM_HOSTS and SM_CURRENT_HOST. It does not import cloudtrain.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(local_rank: int, args: argparse.Namespace) -> None:
    """Train a classifier of points inside and outside of a circle, and save it."""
    world_size = len(args.hosts) * args.processes
    rank = sorted(args.hosts).index(args.current_host) * args.processes + local_rank
    use_gpu = torch.cuda.device_count() > local_rank
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    # cloudtrain sets the address. The default, the name of the first host, resolves in SageMaker's network only.
    os.environ.setdefault("MASTER_ADDR", min(args.hosts))
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("nccl" if use_gpu else "gloo", rank=rank, world_size=world_size)

    points = torch.rand(400, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = TensorDataset(points, (points.square().sum(dim=1) < 0.6).long())  # noqa: PLR2004
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if use_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)

    if rank == 0:
        torch.save(net.state_dict(), os.path.join(args.model_dir, "model.pt"))
        print(f"world size {world_size}: saved {args.model_dir}/model.pt", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--processes", type=int, default=int(os.environ["SM_NUM_GPUS"]) or 2)
    parser.add_argument("--hosts", default=json.loads(os.environ["SM_HOSTS"]))
    parser.add_argument("--current-host", default=os.environ["SM_CURRENT_HOST"])
    parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
    options = parser.parse_args()
    mp.spawn(train, args=(options,), nprocs=options.processes)
