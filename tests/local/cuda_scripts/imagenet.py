"""In the style of classic ImageNet training: one process per GPU, `.cuda(gpu)`, DDP, and a checkpoint that is read."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.backends.cudnn.benchmark = True
    dist.init_process_group(backend="nccl", init_method="env://")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda(gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu], output_device=gpu)
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.randn(64, 3, 8, 8)
    data = TensorDataset(images, images.mean(dim=(2, 3)).argmax(dim=1))
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, 8, sampler=sampler, num_workers=1, pin_memory=True, persistent_workers=True
    )
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=gpu)
        for inputs, labels in loader:
            scores = model(inputs.cuda(gpu, non_blocking=True))
            loss = criterion(scores, labels.cuda(gpu, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0]).cuda(gpu)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        print(f"imagenet loss {total[0] / total[1]:.4f}", flush=True)
    torch.save(model.state_dict(), f"imagenet-{gpu}.pt")
    model.load_state_dict(torch.load(f"imagenet-{gpu}.pt", map_location=f"cuda:{gpu}"))
    dist.barrier(device_ids=[gpu])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
