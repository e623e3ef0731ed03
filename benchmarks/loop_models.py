"""Models and data of the training loops that are compared. Shapes: B samples, T tokens of context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT.

    Attributes:
        vocabulary: Number of tokens. 50,304 is GPT-2's, rounded up to a multiple of 64.
        context: Tokens of a sample, T.
    """

    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a token's forward and backward pass, 6 N + 12 L d T, as PaLM's appendix B counts them.

        N: weights without positions; L: layers; d: width; T: context.
        """
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * self.context


SHAPES = {
    "gpt": Shape(6, 6, 384, 256, 64),
    "gpt-124m": Shape(12, 12, 768, 50_304, 1024),
    "gpt-tiny": Shape(2, 2, 32, 64, 16),
}
"""Models of 10.8 M parameters, 124 M (GPT-2), and one for tests."""


class Block(nn.Module):
    """A layer of GPT-2: causal attention and an MLP, each after a layer norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, T, width] to the same shape."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """GPT-2 without biases, as nanoGPT has it; the head shares the weights of the token embedding.

    Attributes:
        logits_dtype: Type of the last scores, which shows the precision.
        is_compiled: Whether torch.compile has traced the model.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.logits_dtype: torch.dtype | None = None
        self.is_compiled = False
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = (
                    math.sqrt(2 * shape.layers)
                    if name.endswith(("out.weight", "down.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens and the tokens that follow them, each [B, T]."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        self.logits_dtype, self.is_compiled = logits.dtype, torch.compiler.is_compiling()
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MLP(nn.Module):
    """A classifier of 0.1 M parameters, whose steps are mostly overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of features [B, 128] and labels [B]."""
        return nn.functional.cross_entropy(self.layers(features), labels)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples in a custom dataset class, so that each loop reads them one by one."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.labels[index]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random tokens, cut into samples of T tokens and the tokens that follow each."""

    def __init__(self, shape: Shape, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples, self.context = samples, shape.context
        count = samples * shape.context + 1
        self.tokens = torch.randint(
            shape.vocabulary, (count,), generator=generator, dtype=torch.int32
        )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def make_data(kind: str, samples: int) -> Dataset[Any]:
    """Return random samples, the same in every process."""
    if kind in SHAPES:
        return Windows(SHAPES[kind], samples)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(samples, 128, generator=generator)
    labels = (features @ torch.randn(128, 10, generator=generator)).argmax(dim=1)
    return Rows(features, labels) if kind == "rows" else TensorDataset(features, labels)
