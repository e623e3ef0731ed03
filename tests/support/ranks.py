"""Ranks of the training loop: real processes with real Gloo.

The processes are forked from a fork server that has imported torch, so a group of four starts in less than a second.
Their code is in this module because the fork server must import it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import CheckpointConfig, TrainConfig, format_event, parse_event
from support.fork_server import fork_server

LENGTH = 154
TRAIN = TrainConfig(
    epochs=2,
    steps=None,
    batch_size=6,
    accumulate=1,
    precision="fp32",
    compile=False,
    clip_grad_norm=1.0,
    learning_rate=0.02,
    seed=5,
    evaluate_every_steps=None,
    early_stopping=None,
)
_SECONDS = 120


@dataclass(frozen=True)
class Trial:
    """One start of a run.

    Attributes:
        ranks: Number of processes.
        folder: Folder of the run, for checkpoints and outputs.
        noisy: Train with dropout and batch norm, whose states differ between ranks.
        killed_at: Step at which the last rank is killed, in its forward pass.
        ends_at: Step at which the run ends and saves.
        train: Training configuration.
        uri: URI of the checkpoints; by default below `folder`.
        environ: Further environment variables of the ranks.
        dtype: Type of the model's parameters. Use float64 to compare runs with different numbers of ranks.
    """

    ranks: int
    folder: Path
    noisy: bool = False
    killed_at: int | None = None
    ends_at: int | None = None
    train: TrainConfig = TRAIN
    uri: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Trace:
    """The result of one start.

    Attributes:
        losses: Loss by step.
        samples: Indices of the samples of each step, in global order.
        text: Output of all ranks.
        weights: Weights of the exported model, or None.
    """

    losses: dict[int, float]
    samples: dict[int, list[int]]
    text: str
    weights: Mapping[str, torch.Tensor] | None


def start(trial: Trial) -> Trace:
    """Run the ranks to their end. If one fails, kill the others, as a launcher does."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    for old in [
        *trial.folder.glob("output-*"),
        *trial.folder.glob("samples-*"),
        *trial.folder.glob("model/*.pt"),
    ]:
        old.unlink()
    ready = fork_server("cloudtrain_runtime.training.trainer", "support.ranks")
    port = free_port()
    processes = [
        ready.Process(target=_rank, args=(trial, rank, port), daemon=True)
        for rank in range(trial.ranks)
    ]
    for process in processes:
        process.start()
    _finish(processes)
    return _read(trial)


def _finish(processes: Sequence[Any]) -> None:
    left = {process.sentinel: process for process in processes}
    while left:
        ended = wait(list(left), timeout=_SECONDS)
        if not ended or any(left.pop(sentinel).exitcode for sentinel in ended):  # type: ignore[call-overload]
            for process in left.values():
                process.kill()
            for process in processes:
                process.join()
            assert ended, "the ranks hang"
            return


def _read(trial: Trial) -> Trace:
    text = "".join(path.read_text() for path in sorted(trial.folder.glob("output-*")))
    events = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
    shares: dict[int, dict[int, list[int]]] = {}
    for rank in range(trial.ranks):
        for line in (trial.folder / f"samples-{rank}").read_text().splitlines():
            step, used = json.loads(line)
            shares.setdefault(step, {}).setdefault(rank, []).extend(used)
    model = trial.folder / "model" / "model.pt"
    return Trace(
        {event["step"]: event["exact"] for event in events if event["event"] == "exact"},
        {step: _interleave(shares[step]) for step in sorted(shares)},
        text,
        torch.load(model, weights_only=True) if model.exists() else None,
    )


def _interleave(shares: Mapping[int, list[int]]) -> list[int]:
    """Return a step's samples in global order: sample i belongs to rank i modulo the number of ranks."""
    rounds = itertools.zip_longest(*(shares[rank] for rank in sorted(shares)))
    return [sample for turn in rounds for sample in turn if sample is not None]


class _Numbers(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Random inputs with their sum as the target, and with their index."""

    def __init__(self) -> None:
        self.inputs = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True), index


def _model(noisy: bool) -> nn.Module:
    # The layers are registered in another order than they are called. By default, DDP would rebuild its buckets.
    layers = {"last": nn.Linear(64, 1), "first": nn.Linear(6, 64), "middle": nn.Linear(64, 64)}
    model = nn.ModuleDict({**layers, "norm": nn.BatchNorm1d(64) if noisy else nn.Identity()})
    drop = nn.Dropout(0.3 if noisy else 0.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = model["norm"](F.relu(model["first"](x)))
        return model["last"](drop(F.relu(model["middle"](hidden))))  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    return model


def _rank(trial: Trial, rank: int, port: int) -> None:
    """Run one rank, and end its process."""
    import warnings

    from cloudtrain_runtime.process import process_group
    from cloudtrain_runtime.process.run_context import read_context
    from cloudtrain_runtime.task import Task
    from cloudtrain_runtime.training.trainer import Trainer

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(trial.dtype)
    (trial.folder / "ml" / "output").mkdir(parents=True, exist_ok=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(trial.ranks),
        LOCAL_WORLD_SIZE=str(trial.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CLOUDTRAIN_ML_ROOT=str(trial.folder / "ml"),
        **dict(trial.environ),
    )
    for stream in (1, 2):
        os.dup2(
            os.open(trial.folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream
        )
    context = replace(
        read_context(os.environ), model_dir=trial.folder / "model", seed=trial.train.seed
    )
    log = (trial.folder / f"samples-{rank}").open("a")
    trainers: list[Trainer] = []

    class Fit(Task):
        def model(self) -> nn.Module:
            return _model(trial.noisy)

        def datasets(self) -> Mapping[str, Dataset[Any]]:
            return {"train": _Numbers()}

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            step = trainers[0].position.step
            if step == trial.killed_at and rank == trial.ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            log.write(json.dumps([step, batch[2].tolist()]) + "\n")
            log.flush()
            return F.mse_loss(model(batch[0]), batch[1])

    class Exact(Trainer):
        def _log(self, total: torch.Tensor, grad_norm: torch.Tensor | None) -> None:  # noqa: ARG002 (the signature)
            # The loop's own events round to 6 digits.
            exact = float(self.mesh.mean(total))
            if self.context.is_main:
                os.write(
                    1,
                    (
                        format_event("exact", {"step": self.position.step, "exact": exact}) + "\n"
                    ).encode(),
                )

    train = (
        trial.train
        if trial.ends_at is None
        else replace(trial.train, epochs=None, steps=trial.ends_at)
    )
    settings = CheckpointConfig(
        uri=trial.uri or (trial.folder / "checkpoints").as_uri(),
        every_seconds=None,
        every_steps=1,
        keep=2,
        resume="auto",
    )
    process_group.join_ranks(context)
    trainers.append(Exact(Fit(), train, settings, context))
    trainers[0].log_every = 1
    trainers[0].run()
    sys.stdout.flush()
    os._exit(0)
