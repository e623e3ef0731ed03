"""A small transformer, trained with each kind of parallelism: real processes, real Gloo.

The processes are forked from a server that has imported torch, so a group of eight starts in a second. Their code is in
this module because the fork server must import it.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import Dataset

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import CheckpointConfig, TrainConfig, parse_event
from cloudtrain_runtime.distributed import layer_chain, pipeline
from cloudtrain_runtime.task import Task
from support.fork_server import fork_server

TRAIN = TrainConfig(
    epochs=None,
    steps=20,
    batch_size=4,
    accumulate=4,
    precision="fp32",
    compile=False,
    clip_grad_norm=1.0,
    learning_rate=0.01,
    seed=5,
    evaluate_every_steps=None,
    early_stopping=None,
)
VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 16, 8, 32, 4, 3
SIX_DIGITS = 1.5e-5
"""Relative tolerance for numbers in events. They have six digits and can differ by one unit in the last digit.

With another order of summation, this tolerance is sufficient only for models in float64. The training loop reports
losses and norms from float32, which has a relative error of 6e-8."""
ADAM_SHIFT = 1e-7
"""Largest effect of rounding on a weight in one step of AdamW, with float64 and a learning rate of at most 0.02.

AdamW divides a gradient by its own size plus 1e-8. A gradient that consists of rounding errors only (up to 5e-14 where
gradients are about 1) changes a weight by 0.02 * 5e-14 / 1e-8. In float32 the change is as large as the learning rate.
"""
_SECONDS = 180
_REFUSAL = "supports data: ddp only; use torch 2.6 or newer"


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        losses: Loss of each step, in order, with 6 digits.
        grad_norms: Gradient norm of each step, if the run clips gradients.
        reason: Reason of the failure in one line, or None.
        events: Events of rank 0.
        text: Output of all ranks.
        weights: Weights of the exported model, or None.
    """

    losses: list[float]
    grad_norms: list[float]
    reason: str | None
    events: list[dict[str, Any]]
    text: str
    weights: Mapping[str, torch.Tensor] | None


def losses(
    train: TrainConfig,
    ranks: int,
    folder: Path,
    *,
    samples: int = 1_000,
    checkpoint: CheckpointConfig | None = None,
    task: type[Small] | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """Train on several ranks; return the losses by step, or the reason of the failure.

    Args:
        train: Training configuration of the job, including `parallel`.
        ranks: Number of processes.
        folder: Folder for outputs. The model is written to `model`.
        samples: Length of the data set.
        checkpoint: Checkpoint configuration. By default the run starts without a checkpoint.
        task: A subclass of `Small` to train.
        arguments: Further arguments of the task.
        dtype: Type of the model's parameters. Use float64 to compare runs with different numbers of ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("output-*"), *folder.glob("model/*")]:
        old.unlink()
    saving = checkpoint or CheckpointConfig(
        (folder / "checkpoints").as_uri(), None, None, 1, "never"
    )
    given = {"samples": samples, **(arguments or {})}
    ready = fork_server("cloudtrain_runtime.training.trainer", "support.parallel_training")
    port = free_port()
    settings = (train, folder, saving, partial(task or Small, **given), (ranks, port), dtype)
    processes = [
        ready.Process(target=_rank, args=(rank, *settings), daemon=not train.workers)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return _read(folder, _finish(processes))


class Windows(Dataset[torch.Tensor]):
    """Texts of T + 1 tokens. With probability 0.8, a token is the previous one plus 1."""

    def __init__(self, samples: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        jumps = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
        is_jump = torch.rand(samples, LENGTH + 1, generator=generator, dtype=torch.float32) < 0.2
        self.texts = (torch.where(is_jump, jumps, 1).cumsum(1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]


class Embedding(nn.Module):
    """Tokens [B, T] to vectors [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.tokens(x_BT) + self.positions(
            torch.arange(x_BT.shape[1], device=x_BT.device)
        )
        return vectors


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x_BTD)
        # With tensor parallelism, a rank has a part of the heads.
        q, k, v = (
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x_BTD = x_BTD + self.dropout(self.to_out(attended))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Model(nn.Module):
    """Scores [B, T, V] of the next token."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x_BT)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Small(Task):
    """Predict the next token."""

    def __init__(self, samples: int, *, dropout: float = 0.0, validates: int = 0) -> None:
        self.samples, self.dropout, self.validates = samples, dropout, validates
        self.learning_rate = TRAIN.learning_rate

    def model(self) -> nn.Module:
        return Model(self.dropout)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        validation = {"validation": Windows(self.validates, seed=2)} if self.validates else {}
        return {"train": Windows(self.samples), **validation}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"accuracy": (model(batch[:, :-1]).argmax(-1) == batch[:, 1:]).float().mean(1)}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Module] | None:
        """Split heads and the feed-forward layer."""
        plan = {
            **dict.fromkeys(("to_q", "to_k", "to_v", "up"), ColwiseParallel()),
            **dict.fromkeys(("to_out", "down"), RowwiseParallel()),
        }
        for block in model.blocks if mesh["tensor"].size() > 1 else ():  # type: ignore[union-attr]
            parallelize_module(block, mesh["tensor"], plan)
        return list(model.blocks)  # type: ignore[arg-type]

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:  # noqa: ARG002
        return [model.embedding, *model.blocks, model.head]  # type: ignore[list-item,misc]


def task_of(name: str, *, samples: int) -> Task:
    """Return the Task `module:Class` of a module on sys.path."""
    module, _, attribute = name.partition(":")
    found: Task = getattr(importlib.import_module(module), attribute)()
    return found


def cut_evenly() -> None:
    """Use equal times for all links of pipelines in this process. Measured times can give runs different stages."""
    measure = pipeline.profile_chain

    def profile(links: Sequence[nn.Module], *arguments: Any) -> layer_chain.ChainProfile:
        return replace(measure(links, *arguments), seconds=(1.0,) * len(links))

    pipeline.profile_chain = profile


def _finish(processes: Sequence[Any]) -> str | None:
    """Wait for all processes. If one fails, kill the others and return the reason; else return None."""
    left = {process.sentinel: process for process in processes}
    problem = None
    while left and problem is None:
        ended = wait(list(left), timeout=_SECONDS)
        codes = [left.pop(sentinel).exitcode for sentinel in ended]  # type: ignore[call-overload]
        if not ended:
            problem = f"the ranks hang after {_SECONDS} s"
        elif any(codes):
            problem = f"a rank ended with {next(filter(None, codes))}"
    for process in processes:
        if problem is not None:
            process.join(1)  # other ranks may print the reason, too
            process.kill()
        process.join()
    return problem


def _read(folder: Path, problem: str | None) -> Outcome:
    texts = [path.read_text() for path in sorted(folder.glob("output-*"))]
    events = [event for line in texts[0].splitlines() if (event := parse_event(line)) is not None]
    steps = [event for event in events if event["event"] == "step"]
    model = folder / "model" / "model.pt"
    reasons = [
        line[len("FAILED ") :]
        for text in texts
        for line in text.splitlines()
        if line.startswith("FAILED ")
    ]
    if any(_REFUSAL in reason for reason in reasons):
        pytest.skip(f"torch {torch.__version__} {_REFUSAL}")
    return Outcome(
        [event["loss"] for event in steps],
        [event["grad_norm"] for event in steps if "grad_norm" in event],
        # A rank whose peer has failed reports only Gloo's error.
        None if problem is None else min(reasons or [problem], key=lambda reason: "gloo" in reason),
        events,
        "".join(texts),
        torch.load(model, weights_only=True) if model.exists() else None,
    )


def _rank(
    rank: int,
    train: TrainConfig,
    folder: Path,
    checkpoint: CheckpointConfig,
    task: Callable[[], Small],
    world: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Run one rank, and end its process."""
    import warnings

    from cloudtrain_runtime.process import process_group as group
    from cloudtrain_runtime.process import run_context
    from cloudtrain_runtime.training.trainer import Trainer

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    ranks, port = world
    (folder / "ml" / "output").mkdir(parents=True, exist_ok=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CLOUDTRAIN_ML_ROOT=str(folder / "ml"),
        CLOUDTRAIN_LOG_EVERY_STEPS="1",
    )
    for stream in (1, 2):
        os.dup2(os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    context = replace(
        run_context.read_context(os.environ),
        model_dir=folder / "model",
        output_dir=folder / "output",
        seed=train.seed,
    )
    run_context._current = context  # noqa: SLF001 (a Task reads it)
    group.join_ranks(context)
    try:
        chosen = task()
        chosen.learning_rate = train.learning_rate
        Trainer(chosen, train, checkpoint, context).run()
    except BaseException as error:  # noqa: BLE001 (the test must get every error)
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"FAILED {type(error).__name__}: {first}", flush=True)
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
