"""A plain DDP loop with three calls that save and resume the training: checkpoint.load, save and should_stop.

It also runs without cloudtrain's launcher: `torchrun --nproc-per-node 2 train.py --epochs 3`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime import GlobalOrderSampler, checkpoint


def main() -> None:
    """Train a classifier of handwritten digits and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")

    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    sampler = GlobalOrderSampler(len(data), batch_size=options.batch_size)
    # Without its own generator, each start of a loader would change the global random state. The dropout after a
    # resume would then differ from that of an uninterrupted run.
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())

    torch.manual_seed(0)  # all ranks build the same model
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=options.epochs * sampler.steps_per_epoch
    )
    torch.manual_seed(1 + dist.get_rank())  # dropout differs between ranks

    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    checkpoint.load(**run)
    is_stopping = False
    while sampler.epoch < options.epochs and not is_stopping:
        batches = iter(loader)
        for step in sampler.schedule():  # the remaining steps of the epoch
            optimizer.zero_grad()
            for micro in step.micro_batches:
                inputs, labels = next(batches)
                loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
                # All samples of the step have the same weight, also if ranks have different numbers of samples.
                (loss * micro.count * sampler.world_size / step.samples).backward()
            optimizer.step()
            scheduler.step()
            sampler.advance()
            checkpoint.save(sampler.step, **run, force=sampler.epoch == options.epochs)
            if is_stopping := checkpoint.should_stop():
                break
        if dist.get_rank() == 0:
            print(
                f"step {sampler.step}, {sampler.epoch} epochs done: loss {loss.item():.4f}",
                flush=True,
            )

    if dist.get_rank() == 0 and not is_stopping:
        folder = Path(os.environ.get("SM_MODEL_DIR", "."))
        torch.save(net.state_dict(), folder / "model.pt")
        print(f"world size {dist.get_world_size()}: saved {folder / 'model.pt'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
