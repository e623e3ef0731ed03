"""`Run.load_model`: the trained module in the process of a notebook."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.jobs import Cli

import cloudtrain

pytestmark = pytest.mark.processes


def test_model_with_its_weights(
    cli: Cli, small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = types.ModuleType("small")
    monkeypatch.setitem(sys.modules, "small", own)
    done = cli("submit", small(double=True), "--local", "--follow", "--json")
    run = cloudtrain.get_run(done.json["run"])
    cli("checkpoints", "export", run.id, "--to", "torch", "--part", "model", "-o", tmp_path / "m")
    expected = torch.load(tmp_path / "m", weights_only=True)
    path, folder = list(sys.path), Path.cwd()

    model = run.load_model()

    assert not model.training
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert (sys.path, Path.cwd()) == (path, folder)
    assert sys.modules["small"] is own

    earlier = run.load_model(checkpoint=32).state_dict()
    assert not torch.equal(earlier["weight"], expected["weight"])

    with pytest.raises(cloudtrain.UserError, match="best"):
        run.load_model(checkpoint="best")
    with pytest.raises(cloudtrain.UserError, match=r"cloudtrain\.checkpoint_folder"):
        run.load_model(checkpoint=33)


def test_folder_of_the_code_ends_with_the_model(
    cli: Cli, small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = cloudtrain.get_run(cli("submit", small(), "--local", "--follow", "--json").json["run"])
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    model = run.load_model()
    assert [*temporary.glob("*/code/small.py")]
    del model
    gc.collect()
    assert [*temporary.iterdir()] == []
