"""A training loop with Accelerate. checkpoint.load, save and should_stop replace its load_state and save_state."""

import argparse
import contextlib
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime import GlobalOrderSampler, checkpoint


def main() -> None:
    """Train a classifier of handwritten digits and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    # Accelerator creates the process group. Without cpu=True, it trains each rank separately if there are no GPUs.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)  # all ranks build the same model
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=options.lr, momentum=0.9)
    )
    torch.manual_seed(1 + accelerator.process_index)  # dropout differs between ranks

    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    sampler = GlobalOrderSampler(len(data), batch_size=options.batch_size)
    # Do not pass the loader to accelerator.prepare, which would distribute the batches over the ranks again.
    # Without its own generator, each start of a loader would change the global random state, and so the dropout.
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())

    run = {"model": model, "optimizer": optimizer, "sampler": sampler, "scaler": accelerator.scaler}
    checkpoint.load(**run)
    is_stopping = False
    while sampler.epoch < options.epochs and not is_stopping:
        batches = iter(loader)
        for step in sampler.schedule():  # the remaining steps of the epoch
            for micro in step.micro_batches:
                inputs, labels = (part.to(accelerator.device) for part in next(batches))
                is_last = micro is step.micro_batches[-1]
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    loss = F.cross_entropy(model(inputs), labels)
                    # All samples of the step have the same weight, also if ranks have different numbers of samples.
                    accelerator.backward(loss * micro.count * sampler.world_size / step.samples)
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            checkpoint.save(sampler.step, **run, force=sampler.epoch == options.epochs)
            if is_stopping := checkpoint.should_stop():
                break
        if accelerator.is_main_process:
            print(
                f"step {sampler.step}, {sampler.epoch} epochs done: loss {loss.item():.4f}",
                flush=True,
            )

    if accelerator.is_main_process and not is_stopping:
        folder = Path(os.environ.get("SM_MODEL_DIR", "."))
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "model.pt")
        print(f"world size {accelerator.num_processes}: saved {folder / 'model.pt'}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
