"""DDP for SageMaker's PyTorch estimator: folders, hosts and GPUs come from SM_* variables.

The script does not import cloudtrain.
"""

import argparse
import csv
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def read(folder: str) -> TensorDataset:
    """Return points with their label: 1 inside of a circle, else 0."""
    with open(os.path.join(folder, "points.csv"), newline="") as file:
        rows = [[float(value) for value in row] for row in csv.reader(file)]
    table = torch.tensor(rows)
    return TensorDataset(table[:, :2], table[:, 2:])


def train(args: argparse.Namespace) -> None:
    """Train a classifier of points and save it."""
    use_gpu = args.num_gpus > 0
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if local_rank == 0:
        print(
            f"{args.current_host} of {args.hosts}: {json.loads(os.environ['SM_HPS'])}", flush=True
        )

    data = read(args.training)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if use_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for points, inside in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(points.to(device)), inside.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch={epoch}; loss={loss.item():.4f};", flush=True)

    if args.current_host == min(args.hosts) and local_rank == 0:
        torch.save(net.state_dict(), os.path.join(args.model_dir, "model.pt"))
        with open(os.path.join(args.output_data_dir, "result.json"), "w") as file:
            json.dump({"world_size": world_size, "loss": loss.item()}, file)
        print(f"world size {world_size}: saved {args.model_dir}/model.pt", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
    parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--output-data-dir", type=str, default=os.environ["SM_OUTPUT_DATA_DIR"])
    parser.add_argument("--training", type=str, default=os.environ["SM_CHANNEL_TRAINING"])
    parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
    train(parser.parse_args())
