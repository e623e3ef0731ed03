"""The Task that the GPU tests train: a small transformer that records what it is computed with, and fails on demand.

Shapes: B samples, T tokens, D model width, H heads, V vocabulary.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import Dataset

from cloudtrain_runtime import Task, context
from cloudtrain_runtime.process.environment import ml_tree

VOCABULARY = 64
OPTIMIZERS = ("sgd", "adamw", "fused")


class Tokens(Dataset[torch.Tensor]):
    """Sequences of T + 1 tokens, each the one before it plus a step that the sequence keeps."""

    def __init__(self, samples: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        start, step = (
            torch.randint(VOCABULARY, (samples, 1), generator=generator) for _ in range(2)
        )
        self.tokens_NT = (start + step * torch.arange(length + 1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens_NT)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens_NT[index]


class Embedding(nn.Module):
    """Tokens [B, T] to vectors [B, T, D]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        vectors_BTD: torch.Tensor = self.tokens(x_BT) + self.positions[: x_BT.shape[1]]
        return vectors_BTD


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.to_out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x_BTD)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x_BTD = x_BTD + self.dropout(self.to_out(attended))
        return x_BTD + self.dropout(self.down(F.gelu(self.up(self.norm_2(x_BTD)))))


class Model(nn.Module):
    """Scores [B, T, V] of the next token."""

    def __init__(self, width: int, blocks: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(width, length)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(x_BT)
        for block in self.blocks:
            hidden = block(hidden)
        scores_BTV: torch.Tensor = self.head(hidden)
        return scores_BTV


class Probe(Task):
    """Trains the model.

    Args:
        width: Model width D.
        blocks: Number of blocks.
        heads: Attention heads.
        length: Tokens per sample T.
        samples: Length of the data set.
        dropout: Share of activations that training drops.
        double: Whether parameters are float64.
        optimizer: `sgd`, `adamw`, or `fused` (AdamW in one kernel).
        fails: What fails, where and when: `{"rank": 1, "step": 3, "how": "kill"}`, or `hang`, `memory`, `nan`,
            `stop`; a kill on the first start only, and not before the path `after` exists.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        blocks: int = 2,
        heads: int = 4,
        length: int = 32,
        samples: int = 256,
        dropout: float = 0.0,
        double: bool = False,
        optimizer: str = "adamw",
        fails: dict[str, Any] | None = None,
    ) -> None:
        self.shape = (width, blocks, heads, length, dropout)
        self.samples, self.double, self.kind, self.fails = samples, double, optimizer, fails or {}
        self.tokens_per_sample = length
        self.seen: dict[str, Any] = {}

    def model(self) -> nn.Module:
        model = Model(*self.shape)
        if self.double:
            model.double()
        model.blocks[0].up.register_forward_hook(self._record)  # type: ignore[union-attr]
        return model

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"train": Tokens(self.samples, self.shape[3])}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if model.training:
            self._fail(batch)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        return loss * float("nan") if self._is_failing("nan") else loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer
        if self.kind == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=0.1)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=5e-3, fused=self.kind == "fused")
        optimizer.register_step_post_hook(lambda *_: self._write(optimizer))
        return optimizer

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Module] | None:
        plan = {
            **dict.fromkeys(("to_q", "to_k", "to_v", "up"), ColwiseParallel()),
            **dict.fromkeys(("to_out", "down"), RowwiseParallel()),
        }
        for block in model.blocks if mesh["tensor"].size() > 1 else ():  # type: ignore[union-attr]
            parallelize_module(block, mesh["tensor"], plan)
        return list(model.blocks)  # type: ignore[arg-type]

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:  # noqa: ARG002 (the list is always the same)
        return [model.embedding, *model.blocks, model.head]  # type: ignore[list-item,misc]

    def _record(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        self.seen |= {"compute_dtype": str(output.dtype), "compute_device": output.device.type}
        self.seen["passes"] = self.seen.get("passes", 0) + 1

    def _write(self, optimizer: torch.optim.Optimizer) -> None:
        """Write what was seen to `seen-<rank>.json` in the output folder."""
        first: Any = optimizer.param_groups[0]["params"][0]
        self.seen |= {"weight_dtype": str(first.dtype), "weight_device": first.device.type}
        self.seen["is_forked"] = "cloudtrain_runtime.launcher.fork_server" in sys.modules
        file = context().output_dir / f"seen-{context().rank}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.seen))

    def _is_failing(self, how: str) -> bool:
        at = (self.fails.get("how"), self.fails.get("rank"), self.fails.get("step"))
        return at == (how, context().rank, context().step + 1) and not Path("has-failed").exists()

    def _fail(self, batch: torch.Tensor) -> None:
        if self._is_failing("kill"):
            Path("has-failed").touch()
            while self.fails.get("after") and not Path(self.fails["after"]).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_failing("stop"):
            os.kill(int((ml_tree(os.environ).root / "launcher-pid").read_text()), signal.SIGTERM)
        if self._is_failing("memory"):
            # A small part of the card, so that tests beside this one keep theirs.
            torch.cuda.set_per_process_memory_fraction(0.05)
            size = torch.cuda.get_device_properties(batch.device).total_memory // 10
            torch.empty(size, dtype=torch.uint8, device=batch.device)
        if self._is_failing("hang") and batch.device.type == "cuda":
            # Hours of work in the GPU's queue: the host waits for the kernels.
            big = torch.randn(16_384, 16_384, device=batch.device)
            for _ in range(1_000_000):
                big = big @ big
            torch.cuda.synchronize()
        elif self._is_failing("hang"):
            time.sleep(3_600)
