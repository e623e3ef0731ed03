"""What all ways train: data, model, number of epochs, and a line in a file for each step of rank 0."""

import json
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS = 16
SAVE_STEPS = 100
_STEP_SECONDS = 0.05


def make_data() -> TensorDataset:
    """Return images of digits with their labels."""
    digits = load_digits()
    return TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )


def make_net() -> nn.Module:
    """Return a classifier with dropout, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def record(step: int) -> None:
    """Write the time of a step. The step then lasts as long as one of a larger model."""
    if os.environ["RANK"] == "0":
        with open(os.environ["STEPS"], "a") as file:
            file.write(f"{step} {time.time()}\n")
    time.sleep(_STEP_SECONDS)


def name_nodes() -> None:
    """Replace the name of the first node by its address: the nodes of the test cluster have no names that resolve."""
    os.environ["MASTER_ADDR"] = json.loads(os.environ["NODE_ADDRESSES"])[os.environ["MASTER_ADDR"]]
