"""Training loops of loops.py, their models, and their turns. One rank is one process.

Every loop calls the same `loss` once per step. This function measures the time and waits for turns. At the start of a
turn, a rank reads a byte from GO_FD. At its end, the rank writes the seconds of the turn's counted steps to DONE_FD.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from cloudtrain_runtime import Batch, GlobalOrderSampler, Task

RATE = 1e-3
LOG_EVERY = 10


class GPT(nn.Module):
    """A decoder of 10.9 M parameters: 6 blocks of width 384, 6 heads, 64 bytes of context."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(384, 6, 4 * 384, 0.0, nn.functional.gelu, batch_first=True, norm_first=True)
        self.bytes = nn.Embedding(256, 384)
        self.positions = nn.Parameter(torch.zeros(64, 384))
        self.blocks = nn.TransformerEncoder(layer, 6, nn.LayerNorm(384), enable_nested_tensor=False)
        self.head = nn.Linear(384, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map bytes [B, 64] to scores [B, 64, 256]."""
        scores: torch.Tensor = self.head(self.blocks(self.bytes(x) + self.positions, mask=self.mask, is_causal=True))
        return scores


def make_model(kind: str) -> nn.Module:
    """Return an MLP of 0.1 M parameters, or a GPT of 10.9 M."""
    if kind == "gpt":
        return GPT()
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def make_data(kind: str, samples: int) -> Dataset[Any]:
    """Return random samples, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    if kind == "gpt":
        return TensorDataset(torch.randint(256, (samples, 65), generator=generator))
    features = torch.randn(samples, 128, generator=generator)
    labels = (features @ torch.randn(128, 10, generator=generator)).argmax(dim=1)
    return Rows(features, labels) if kind == "rows" else TensorDataset(features, labels)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples in a custom dataset class, so that each loop reads them one by one."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.labels[index]


class Work:
    """Settings and turns of one rank.

    Attributes:
        kind: `mlp`, `rows` (the same model with a custom dataset class) or `gpt`.
        batch_size: Samples per rank and step.
        steps: Steps of the entire run.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.kind: str = settings["kind"]
        self.batch_size: int = settings["batch_size"]
        self.warm, self.counted, self.turns = settings["warm"], settings["counted"], settings["turns"]
        self.steps: int = self.turns * (self.warm + self.counted) + 1
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.losses: list[torch.Tensor] = []
        self._go, self._done = int(os.environ["GO_FD"]), int(os.environ["DONE_FD"])
        self._began = 0.0
        self._until = 0  # calls of `loss` until the turn is checked again

    @property
    def samples(self) -> int:
        """Samples of all ranks and steps."""
        return self.steps * self.batch_size * self.world_size

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch."""
        if len(self.losses) == self._until:
            self._take_turns()
        if self.kind == "gpt":
            scores = model(batch[0][:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[0][:, 1:].flatten())
        else:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def _take_turns(self) -> None:
        at = self._until % (self.warm + self.counted)
        if at == self.warm:
            self._began = time.perf_counter()
            self._until += self.counted
            return
        if self._until:
            os.write(self._done, f"{time.perf_counter() - self._began:.9f}\n".encode())
        if len(self.losses) == self.steps - 1:
            self._write_losses()
            self._until = -1
            return
        os.read(self._go, 1)
        self._until += self.warm

    def _write_losses(self) -> None:
        os.write(self._done, (json.dumps([round(float(loss), 6) for loss in self.losses]) + "\n").encode())

    def batches(self, *, all_ranks: bool = False) -> BatchList:
        """Return the samples of each step in the order of cloudtrain's loop: this rank's, or all ranks' in turn."""
        ranks = range(self.world_size) if all_ranks else [self.rank]
        own = [
            GlobalOrderSampler(self.samples, batch_size=self.batch_size, rank=rank, world_size=self.world_size)
            for rank in ranks
        ]
        return BatchList([batch for step in zip(*own, strict=True) for batch in step], self.batch_size)

    def loader(self, *, all_ranks: bool = False) -> DataLoader[Any]:
        """Return the loader of the training data."""
        return DataLoader(make_data(self.kind, self.samples), batch_sampler=self.batches(all_ranks=all_ranks))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that all loops use."""
        return torch.optim.AdamW(model.parameters(), lr=RATE)

    def log(self, step: int, loss: torch.Tensor) -> None:
        """Print the loss at intervals."""
        if step % LOG_EVERY == 0 and self.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


class BatchList(Sampler[list[int]]):
    """Precomputed batches, the cheapest sampler."""

    def __init__(self, batches: list[list[int]], batch_size: int) -> None:
        self.batches, self.batch_size, self.drop_last = batches, batch_size, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Measured(Task):
    """The same work as a Task."""

    def __init__(self, settings: str) -> None:
        self.work = Work(json.loads(settings))

    def model(self) -> nn.Module:
        """Return the model."""
        torch.manual_seed(0)
        return make_model(self.work.kind)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return the training data."""
        return {"train": make_data(self.work.kind, self.work.samples)}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss."""
        return self.work.loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.work.optimizer(model)


def by_hand(work: Work) -> None:
    """Train with plain torch."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = make_model(work.kind)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True) if work.world_size > 1 else net
    optimizer = work.optimizer(model)
    for step, batch in enumerate(work.loader(), 1):
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        work.log(step, loss)


def with_fabric(work: Work) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=work.world_size, strategy="ddp" if work.world_size > 1 else "auto")
    fabric.launch()
    torch.manual_seed(0)
    net = make_model(work.kind)
    model, optimizer = fabric.setup(net, work.optimizer(net))
    loader = fabric.setup_dataloaders(work.loader(), use_distributed_sampler=False)
    for step, batch in enumerate(loader, 1):
        loss = work.loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        work.log(step, loss)


def with_accelerate(work: Work) -> None:
    """Train with Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = make_model(work.kind)
    loader = work.loader(all_ranks=True)  # Accelerate distributes the batches
    model, optimizer, loader = accelerator.prepare(net, work.optimizer(net), loader)
    for step, batch in enumerate(loader, 1):
        loss = work.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        work.log(step, loss)


def with_trainer(work: Work) -> None:
    """Train with Lightning's Trainer, without its logger, progress bar and checkpoints."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = make_model(work.kind)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = work.loss(self.net, batch)
            work.log(index + 1, loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.net)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=work.world_size,
        strategy="ddp" if work.world_size > 1 else "auto",
        max_steps=work.steps,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), work.loader())


LOOPS = {"hand": by_hand, "fabric": with_fabric, "trainer": with_trainer, "accelerate": with_accelerate}


def main() -> None:
    """Run the loop that the command line names. `cloudtrain` runs the worker of a run."""
    settings = Path(sys.argv[2]).read_text()
    torch.set_num_threads(1)
    if sys.argv[1] == "cloudtrain":
        from cloudtrain_runtime import worker

        worker.main()
    LOOPS[sys.argv[1]](Work(json.loads(settings)))
    os._exit(0)  # torch's shutdown with Gloo sometimes aborts


if __name__ == "__main__":
    main()
