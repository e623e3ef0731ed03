"""A small byte-level GPT that learns the source text of Python's standard library.

Shapes: B samples, T bytes of context, D model width, H heads of K values each, V = 256 byte values.
"""

import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import Dataset

from cloudtrain_runtime import Batch, Task, context

VOCABULARY = 256


class Windows(Dataset[torch.Tensor]):
    """Non-overlapping windows of T + 1 bytes: the first T are input, the last T the target."""

    def __init__(self, text_N: torch.Tensor, length: int) -> None:
        self.text_N = text_N
        self.length = length

    def __len__(self) -> int:
        return (len(self.text_N) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.length
        return self.text_N[start : start + self.length + 1].long()


class Embedding(nn.Module):
    """Byte embeddings and learned positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Map bytes [B, T] to [B, T, D]."""
        vectors_BTD: torch.Tensor = self.bytes(x_BT) + self.positions[: x_BT.shape[1]]
        return vectors_BTD


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Separate layers, so that tensor parallelism can assign complete heads to each rank.
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.to_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map [B, T, D] to [B, T, D]."""
        normed_BTD = self.norm_1(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            project(normed_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        attended_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.to_out(attended_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.feed_forward(self.norm_2(x_BTD))


class Model(nn.Module):
    """Byte embeddings, learned positions, blocks, and scores for the next byte."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = Embedding(width, length)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Map bytes [B, T] to scores [B, T, V]."""
        scores_BTV: torch.Tensor = self.head(self.blocks(self.embedding(x_BT)))
        return scores_BTV


class GPT(Task):
    """Predict the next byte of Python's standard library.

    Args:
        layers: Blocks.
        width: Model width D.
        heads: Attention heads; they divide the width.
        context_bytes: Context length T.
        files: Number of the library's modules to read, in alphabetical order.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context_bytes: int = 128,
        files: int = 100,
    ) -> None:
        self.layers, self.width, self.heads, self.length = layers, width, heads, context_bytes
        self.files = files
        self.tokens_per_sample = context_bytes  # to report the throughput in tokens, too

    def model(self) -> nn.Module:
        """Return the model: bytes [B, T] to scores [B, T, 256]."""
        return Model(self.layers, self.width, self.heads, self.length)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return the last 5 % of the text for validation and the 5 % before it for the test."""
        text_N = read_library(self.files)
        first, second = int(0.90 * len(text_N)), int(0.95 * len(text_N))
        if context().is_main:
            print(
                f"{len(text_N):,} bytes of text, unigram entropy {unigram_entropy(text_N):.3f} nats per byte",
                flush=True,
            )
        parts = {
            "train": text_N[:first],
            "test": text_N[first:second],
            "validation": text_N[second:],
        }
        return {split: Windows(part_N, self.length) for split, part_N in parts.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy in nats per byte."""
        scores_BTV = model(batch[:, :-1])
        return F.cross_entropy(scores_BTV.flatten(0, 1), batch[:, 1:].flatten())

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Module]:
        """Split heads and feed-forward layers over the ranks of a tensor group; return the blocks as FSDP units."""
        blocks: Any = model.blocks
        first, last = ColwiseParallel(), RowwiseParallel()
        plan = {
            "to_q": first,
            "to_k": first,
            "to_v": first,
            "to_out": last,
            "feed_forward.0": first,
        }
        if mesh["tensor"].size() > 1:
            for block in blocks:
                parallelize_module(block, mesh["tensor"], {**plan, "feed_forward.2": last})
        return list(blocks)

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the modules that compute the scores, in the order of the forward pass."""
        parts: Any = model
        return [parts.embedding, *parts.blocks, parts.head]

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the share of correctly predicted bytes for each window."""
        return {"accuracy": (model(batch[:, :-1]).argmax(-1) == batch[:, 1:]).float().mean(dim=1)}


def read_library(files: int) -> torch.Tensor:
    """Return the bytes [N] of the standard library's top-level modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:files])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unigram_entropy(text_N: torch.Tensor) -> float:
    """Return the entropy of single bytes in nats: the loss of a model that predicts only their frequencies."""
    shares = torch.bincount(text_N.long(), minlength=VOCABULARY).double() / len(text_N)
    return float(-(shares * torch.where(shares > 0, shares, 1).log()).sum())
