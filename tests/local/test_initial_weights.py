"""`train.init_from: RUN` in local runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import Cli

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"


def weights_of(cli: Cli, run: str, folder: Path) -> dict[str, torch.Tensor]:
    exported = cli(
        "checkpoints", "export", run, "--to", "torch", "--part", "model", "-o", folder / f"{run}.pt"
    )
    assert exported.code == 0, exported.err
    loaded: dict[str, torch.Tensor] = torch.load(folder / f"{run}.pt", weights_only=True)
    return loaded


def test_a_run_starts_with_the_weights_of_another(cli: Cli, tmp_path: Path) -> None:
    for name in ("small.py", "job.yaml"):
        shutil.copy(GOLDEN / name, tmp_path)
    job = tmp_path / "job.yaml"
    own = ("--set", "checkpoint.uri=null")
    first = cli("submit", job, "--local", *own, "--follow", "--json")
    assert first.code == 0, first.err
    run = first.json["run"]
    still = (
        "--set",
        f"train.init_from={run}",
        "--set",
        "train.learning_rate=1e-30",
        "--set",
        "train.steps=1",
    )
    planned = cli("plan", job, "--local", *own, *still, "--json").json
    assert any(
        "a new run starts with the weights of file://" in line for line in planned["decisions"]
    )
    second = cli("submit", job, "--local", *own, *still, "--follow", "--json")
    assert (second.code, second.json["last_step"]) == (0, 1), second.err
    before, after = weights_of(cli, run, tmp_path), weights_of(cli, second.json["run"], tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
