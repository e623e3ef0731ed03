"""Weights of a served or loaded model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloudtrain_runtime.checkpoint.initial_weights import load_initial_weights
from cloudtrain_runtime.errors import CheckpointError, JobError
from cloudtrain_runtime.process.run_context import context
from cloudtrain_runtime.serving.model_loading import load_weights


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_loaded(tmp_path: Path, device: str) -> None:
    trained = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    with torch.device(device):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    load_weights(model, tmp_path / "model.pt")
    inputs = torch.ones(4, 3)
    assert torch.equal(model.eval()(inputs), trained.eval()(inputs))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"not a model", "is not a file of torch.save(model.state_dict()): "),
        (b"", "is not a file of torch.save(model.state_dict()): "),
        ([1, 2], "holds a list; save model.state_dict() instead"),
        (
            nn.Linear(3, 2),
            "is not a file of torch.save(model.state_dict()): Weights only load failed",
        ),
    ],
    ids=["text", "empty", "list", "module"],
)
def test_a_file_without_weights_is_refused(tmp_path: Path, content: Any, expected: str) -> None:
    """Served models and `train.init_from` read the same files."""
    file = tmp_path / "model.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(JobError, match=re.escape(f"model.pt {expected}")) as served:
        load_weights(nn.Linear(3, 2), file)
    with pytest.raises(CheckpointError) as begun:
        load_initial_weights(nn.Linear(3, 2), str(file), context())
    assert str(begun.value) == f"train.init_from: {file.parent}/{served.value}"


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "model.pt")
    with pytest.raises(JobError, match="size mismatch for weight"):
        load_weights(nn.Linear(3, 4), tmp_path / "model.pt")
