"""Classification of handwritten digits: 1,797 real images of 8 x 8 pixels from scikit-learn, and a small ConvNet."""

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime import Batch, Task


class Digits(Task):
    """Classify digits.

    Args:
        channels: Width of the first convolution.
        dropout: Probability that a hidden unit is dropped.
    """

    def __init__(self, channels: int = 32, dropout: float = 0.1) -> None:
        self.channels = channels
        self.dropout = dropout

    def model(self) -> nn.Module:
        """Map images [N, 1, 8, 8] to scores [N, 10]."""
        return nn.Sequential(
            nn.Conv2d(1, self.channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.channels, 2 * self.channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * self.channels * 16, 10),
        )

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return 70 % of the images for training, 15 % for validation, 15 % for the test."""
        digits = load_digits()
        images = (
            torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        )  # 0 to 16 in the file
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        first, second = int(0.7 * len(order)), int(0.85 * len(order))
        parts = {"train": order[:first], "validation": order[first:second], "test": order[second:]}
        return {
            split: TensorDataset(images[index], labels[index]) for split, index in parts.items()
        }

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy in nats."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return 1 for each image that is classified correctly, else 0."""
        images, labels = batch
        return {"accuracy": (model(images).argmax(dim=1) == labels).float()}

    def predict(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predicted and the true digit of each image, for the analysis of the test split after training."""
        images, labels = batch
        return model(images).argmax(dim=1), labels
