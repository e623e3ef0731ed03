"""The training loops that loops.py and gpu.py compare. One rank is one process.

Every loop calls `Work.loss` once per step. It describes itself after the first step, waits for turns (turns.py), sends
the figures of each turn at its end, and the losses after the last turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from loop_models import GPT, MLP, SHAPES, make_data
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from turns import Turns

from cloudtrain_runtime import Batch, GlobalOrderSampler, Task
from cloudtrain_runtime.contract import (
    WORKER_SCRIPT,
    CheckpointConfig,
    MlTree,
    RunConfig,
    TrainConfig,
)

RATE = 1e-3
LOG_EVERY = 10


@dataclass(frozen=True)
class Settings:
    """The work, the same for all loops.

    Attributes:
        kind: A name of `SHAPES`, `mlp`, or `rows` (the same model with a custom dataset class).
        batch_size: Samples per rank and step.
        warm: Steps of a turn before its counted steps.
        counted: Measured steps of a turn.
        turns: Number of turns.
        workers: Processes that load data, per rank.
        device: `cpu` or `cuda`.
        bf16: Whether products are computed in bf16 (autocast).
        compiles: Whether torch.compile compiles the model.
        clip: Upper bound of the gradient norm; None does not clip.
        is_timed: Whether the loop by hand measures how long it waits for data.
    """

    kind: str
    batch_size: int
    warm: int
    counted: int
    turns: int
    workers: int = 0
    device: str = "cpu"
    bf16: bool = False
    compiles: bool = False
    clip: float | None = None
    is_timed: bool = False

    @property
    def steps(self) -> int:
        """Steps of the entire run: one before the first turn, and one after the last."""
        return self.turns * (self.warm + self.counted) + 2


class Work:
    """Model, data and turns of one rank."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.world_size = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        self.net: nn.Module = nn.Identity()
        self._losses: list[torch.Tensor] = []
        self._turns = Turns()
        self._waited = self._began = self._waited_before = 0.0
        self._until = 1  # calls of `loss` until the turn is checked again
        if settings.device == "cuda":
            torch.set_float32_matmul_precision("high")
        else:
            torch.set_num_threads(1)

    def model(self) -> nn.Module:
        """Return the model, on the CPU."""
        torch.manual_seed(0)
        kind = self.settings.kind
        self.net = GPT(SHAPES[kind]) if kind in SHAPES else MLP()
        return self.net

    def compiled(self, model: nn.Module) -> Any:
        """Return the model, compiled if the settings say so."""
        return torch.compile(model) if self.settings.compiles else model

    @property
    def samples(self) -> int:
        """Samples of all ranks and steps."""
        return self.settings.steps * self.settings.batch_size * self.world_size

    def loader(self, *, all_ranks: bool = False) -> DataLoader[Any]:
        """Return the samples of each step in the order of cloudtrain's loop: this rank's, or all ranks' in turn."""
        ranks = range(self.world_size) if all_ranks else [self.rank]
        size = self.settings.batch_size
        own = [
            GlobalOrderSampler(self.samples, batch_size=size, rank=rank, world_size=self.world_size)
            for rank in ranks
        ]
        batches = BatchList([batch for step in zip(*own, strict=True) for batch in step], size)
        return DataLoader(
            make_data(self.settings.kind, self.samples),
            batch_sampler=batches,
            num_workers=self.settings.workers,
            pin_memory=self.settings.device == "cuda",
        )

    def on_device(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return the batches on the device; with `is_timed` the time that they take is measured."""
        return self._timed(iter(loader)) if self.settings.is_timed else loader

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in range(self.settings.steps):
            began = time.perf_counter()
            batch = [each.to(self.settings.device, non_blocking=True) for each in next(batches)]
            self._waited += time.perf_counter() - began
            yield batch

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that all loops use."""
        is_cuda = self.settings.device == "cuda"
        return torch.optim.AdamW(model.parameters(), lr=RATE, fused=is_cuda or None)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch. Waits for the next turn where one has ended."""
        if len(self._losses) == self._until:
            self._take_turns()
        loss: torch.Tensor = model(*batch)
        self._losses.append(loss.detach())
        return loss

    def log(self, step: int, loss: torch.Tensor) -> None:
        """Print the loss at intervals."""
        if step % LOG_EVERY == 0 and self.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    def _take_turns(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        done = self._until - 1  # the first step belongs to no turn
        if done % (self.settings.warm + self.settings.counted) == self.settings.warm:
            self._began, self._waited_before = now, self._waited
            self._until += self.settings.counted
            return
        self._turns.send(self._turn(now) if done else self._describe())
        if self._until == self.settings.steps - 1:
            self._turns.send([round(float(loss), 6) for loss in self._losses])
            self._until = -1
            return
        self._turns.wait()
        self._until += self.settings.warm

    def _turn(self, now: float) -> dict[str, float]:
        """Return the figures of the turn that has ended."""
        is_cuda = self.settings.device == "cuda"
        of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "seconds": now - self._began,
            "waited": self._waited - self._waited_before,
            "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else of_process,
        }

    def _describe(self) -> dict[str, Any]:
        """Return what shows, after the first step, that the loop does what it is meant to do."""
        return {
            "device": next(self.net.parameters()).device.type,
            "dtype": str(getattr(self.net, "logits_dtype", None)),
            "is_compiled": getattr(self.net, "is_compiled", False),
            "is_forked": "cloudtrain_runtime.launcher.fork_server" in sys.modules,
        }


def write_run(settings: Settings, root: Path, *, ranks: int) -> None:
    """Write /opt/ml of a host that trains the Task: the code and run.json, without checkpoints at intervals."""
    tree = MlTree(root)
    for place in (tree.run_config.parent, tree.code, tree.heartbeats, tree.model, tree.output_data):
        place.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, tree.code)
    (tree.code / WORKER_SCRIPT).write_text("from cloudtrain_runtime.worker import main\n\nmain()\n")
    train = TrainConfig(
        epochs=None,
        steps=settings.steps,
        batch_size=settings.batch_size,
        accumulate=1,
        precision="bf16" if settings.bf16 else "fp32",
        compile=settings.compiles,
        clip_grad_norm=settings.clip,
        learning_rate=RATE,
        seed=0,
        evaluate_every_steps=None,
        early_stopping=None,
        workers=settings.workers,
    )
    config = RunConfig(
        run="loops",
        task="loop_work:Measured",
        script=None,
        args={"settings": json.dumps(asdict(settings))},
        requirements=None,
        processes_per_instance=ranks,
        distribution="torch_distributed",
        max_restarts=0,
        train=train,
        checkpoint=CheckpointConfig((root / "saves").as_uri(), None, None, 1, "never"),
        hang_seconds=None,
    )
    tree.run_config.write_text(config.to_json())


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
        self.work = Work(Settings(**json.loads(settings)))
        if shape := SHAPES.get(self.work.settings.kind):
            self.tokens_per_sample = shape.context
            self.flops_per_sample = (
                shape.flops_per_token * shape.context
            )  # else `loss` is called to count them

    def model(self) -> nn.Module:
        """Return the model."""
        return self.work.model()

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return the training data."""
        return {"train": make_data(self.work.settings.kind, self.work.samples)}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss."""
        return self.work.loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.work.optimizer(model)


def by_hand(work: Work) -> None:
    """Train with plain torch, as nanoGPT does."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    settings = work.settings
    net = work.model().to(settings.device)
    if work.world_size > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    model, optimizer = work.compiled(net), work.optimizer(net)
    autocast = (
        torch.autocast(settings.device, dtype=torch.bfloat16)
        if settings.bf16
        else contextlib.nullcontext()
    )
    for step, batch in enumerate(work.on_device(work.loader()), 1):
        with autocast:
            loss = work.loss(model, batch)
        loss.backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        work.log(step, loss)


def with_fabric(work: Work) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    settings = work.settings
    fabric = Fabric(
        accelerator=settings.device,
        devices=work.world_size,
        strategy="ddp" if work.world_size > 1 else "auto",
        precision="bf16-mixed" if settings.bf16 else "32-true",
    )
    fabric.launch()
    net = work.model()
    model, optimizer = fabric.setup(work.compiled(net), work.optimizer(net))
    loader = fabric.setup_dataloaders(work.loader(), use_distributed_sampler=False)
    for step, batch in enumerate(loader, 1):
        loss = work.loss(model, batch)
        fabric.backward(loss)
        if settings.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        work.log(step, loss)


def with_accelerate(work: Work) -> None:
    """Train with Hugging Face Accelerate."""
    from accelerate import Accelerator

    settings = work.settings
    accelerator = Accelerator(
        cpu=settings.device == "cpu", mixed_precision="bf16" if settings.bf16 else "no"
    )
    net = work.model()
    loader = work.loader(all_ranks=True)  # Accelerate distributes the batches
    model, optimizer, loader = accelerator.prepare(work.compiled(net), work.optimizer(net), loader)
    for step, batch in enumerate(loader, 1):
        loss = work.loss(model, batch)
        accelerator.backward(loss)
        if settings.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        work.log(step, loss)


def with_trainer(work: Work) -> None:
    """Train with Lightning's Trainer, without its logger, progress bar and checkpoints."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model()

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
        max_steps=work.settings.steps,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), work.loader())


LOOPS = {
    "hand": by_hand,
    "fabric": with_fabric,
    "trainer": with_trainer,
    "accelerate": with_accelerate,
}


def main() -> None:
    """Run the loop that the command line names. `cloudtrain` runs the worker of a run."""
    if sys.argv[1] == "cloudtrain":
        from cloudtrain_runtime import worker

        torch.set_num_threads(1)
        worker.main()
    LOOPS[sys.argv[1]](Work(Settings(**json.loads(Path(sys.argv[2]).read_text()))))
    os._exit(0)  # torch's shutdown with Gloo sometimes aborts


if __name__ == "__main__":
    main()
