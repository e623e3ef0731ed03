"""A classifier of digits whose backbone can be frozen in part and trained at a smaller learning rate than its head."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime import Batch, Task, context


class Classifier(nn.Module):
    """A small ConvNet.

    Args:
        frozen: Number of blocks of the backbone that are not trained, from the first on.
    """

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(1, 16), block(16, 32), block(32, 32))
        self.head = nn.Sequential(
            nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 10)
        )
        self.frozen = frozen
        self.backbone[:frozen].requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [N, 1, 8, 8] to scores [N, 10]."""
        return self.head(self.backbone(images))

    def train(self, mode: bool = True) -> "Classifier":
        """Keep frozen blocks in evaluation mode: without a gradient, batch norm would still change its statistics."""
        super().train(mode)
        self.backbone[: self.frozen].eval()
        return self


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution with batch norm, which keeps the size of the image."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Digits(Task):
    """Classify scikit-learn's handwritten digits.

    Args:
        photos: Read the collection for fine-tuning, in place of that of the base model.
        frozen: Number of frozen blocks of the backbone.
        backbone_rate: Learning rate of the other blocks, as a factor of that of the head.
    """

    def __init__(self, photos: bool = False, frozen: int = 0, backbone_rate: float = 1.0) -> None:
        self.photos = photos
        self.frozen = frozen
        self.backbone_rate = backbone_rate

    def model(self) -> nn.Module:
        """Return the model; `train.init_from` replaces its weights."""
        return Classifier(self.frozen)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with two groups; their rates are logged by these names, and the job's schedule scales both."""
        rate = context().train.learning_rate
        backbone = [each for each in model.backbone.parameters() if each.requires_grad]
        groups = [
            {"name": "head", "params": list(model.head.parameters()), "lr": rate},
            {"name": "backbone", "params": backbone, "lr": rate * self.backbone_rate},
        ]
        return torch.optim.AdamW(groups)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return 1,200 scans, or the 597 photos: the other digits, with little contrast and noise."""
        digits = load_digits()
        noise = torch.Generator().manual_seed(0)
        order = torch.randperm(len(digits.target), generator=noise)
        images = (
            torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        )  # 0 to 16 in the file
        labels = torch.tensor(digits.target)[order]
        if self.photos:
            images = 0.3 + 0.4 * images + 0.15 * torch.randn(images.shape, generator=noise)
        ends = (1200, 1400, 1500, len(labels)) if self.photos else (0, 1000, 1100, 1200)
        return {
            split: TensorDataset(images[first:end], labels[first:end])
            for split, (first, end) in zip(
                ("train", "validation", "test"), pairwise(ends), strict=True
            )
        }

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy in nats."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return 1 for each image that is classified correctly, else 0."""
        images, labels = batch
        return {"accuracy": (model(images).argmax(dim=1) == labels).float()}
