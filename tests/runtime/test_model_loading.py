"""Weights of a served or loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cloudtrain_runtime.errors import JobError
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
    [(b"not a model", "is not what torch.save writes"), (b"", "is not what torch.save writes")],
    ids=["text", "empty"],
)
def test_a_file_without_weights_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(JobError, match=expected):
        load_weights(nn.Linear(3, 2), tmp_path / "model.pt")


def test_a_value_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "model.pt")
    with pytest.raises(JobError, match="do not fit its model"):
        load_weights(nn.Linear(3, 2), tmp_path / "model.pt")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "model.pt")
    with pytest.raises(JobError, match="size mismatch for weight"):
        load_weights(nn.Linear(3, 4), tmp_path / "model.pt")
