"""In the style of the torchrun tutorial: a Trainer class with a snapshot, on the current accelerator."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """Trains a linear model and continues from its snapshot."""

    def __init__(self, path: str) -> None:
        self.gpu, self.path, self.epoch = int(os.environ["LOCAL_RANK"]), path, 0
        self.model = torch.nn.Linear(8, 1).to(self.gpu)
        if Path(path).exists():
            snapshot = torch.load(
                path, map_location=torch.device("cuda", self.gpu), weights_only=True
            )
            self.model.load_state_dict(snapshot["model"])
            self.epoch = snapshot["epoch"]
        self.model = DistributedDataParallel(self.model, [self.gpu])

    def train(self, epochs: int) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        source = torch.Generator(device="cuda").manual_seed(self.gpu)
        for _ in range(self.epoch, epochs):
            inputs = torch.randn(32, 8, device=f"cuda:{self.gpu}", generator=source)
            loss = F.mse_loss(self.model(inputs), inputs.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"snapshots loss {loss.item():.4f}", flush=True)
        torch.save({"model": self.model.module.state_dict(), "epoch": epochs}, self.path)


def main() -> None:
    assert torch.accelerator.is_available()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    assert kind.type == "cuda"
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend=dist.get_default_backend_for_device(kind))
    path = f"snapshot-{os.environ['LOCAL_RANK']}.pt"
    Trainer(path).train(10)
    Trainer(path).train(20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
