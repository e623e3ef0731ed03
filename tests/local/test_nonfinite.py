"""Runs whose losses or weights are not finite at their end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

JOB = """\
name: odd
code: {task: "odd:Odd", args: ARGS}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: RANKS}
train: {steps: 2, batch_size: 4, TRAIN}
checkpoint: {every: 1 steps}
"""
TASK = '''
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Odd(Task):
    """Linear regression. From step `bad_from` on, the value that `kind` names is not finite."""

    def __init__(self, kind, bad_from=0):
        self.kind, self.bad_from = kind, bad_from

    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        return {"train": data, "validation": data}

    def loss(self, model, batch):
        predicted = model(batch[0])
        loss = F.mse_loss(predicted, batch[1])
        if not model.training:
            return loss * float("inf") if self.kind == "validation" else loss
        if context().step < self.bad_from or self.kind == "validation":
            return loss
        if self.kind == "weights":  # the loss is finite, its gradient is not
            return loss + (predicted - predicted.detach()).abs().sqrt().sum()
        return loss * float("nan")
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Folder of local runs."""
    return tmp_path / "runs-home"


@pytest.fixture
def odd(job: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes the job, with a kind of fault, options of train and the number of ranks."""

    def write(kind: str, train: str = "seed: 0", ranks: int = 1, bad_from: int = 0) -> Path:
        arguments = f"{{kind: {kind}, bad_from: {bad_from}}}"
        text = JOB.replace("ARGS", arguments).replace("TRAIN", train).replace("RANKS", str(ranks))
        return job(text, odd_py=TASK)

    return write


def strict(text: str) -> Any:
    """Parse JSON without the extension NaN."""

    def reject(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=reject)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("kind", "ranks", "expected", "row"),
    [
        ("loss", 2, "its training loss is not finite", "train/loss"),
        ("weights", 1, "its weights are not finite", ""),
        ("validation", 1, "its validation loss is not finite", "validation/loss"),
    ],
)
def test_a_run_that_ends_nonfinite_fails_and_exports_nothing(
    cli: Cli, odd: Callable[..., Path], home: Path, kind: str, ranks: int, expected: str, row: str
) -> None:
    done = cli(
        "submit",
        odd(kind, ranks=ranks, bad_from=kind == "weights"),
        "--local",
        "--follow",
        "--json",
    )
    assert done.code == 4
    status = strict(done.out)
    assert status["state"] == "FAILED"
    assert f"training ended at step 2, and {expected}: no model is exported" in status["reason"]
    if row:
        assert status["metrics"][row] is None
        shown = cli("status", status["run"]).out.splitlines()
        assert "not finite" in next(line for line in shown if line.startswith(row))
    assert not list(home.glob("runs/*/model/*"))
    for path in (*home.rglob("*.json"), *home.rglob("*.jsonl")):
        for line in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            strict(line)
    if kind != "validation":
        saved = cli("checkpoints", status["run"], "--json").json["checkpoints"]
        assert [entry["step"] for entry in saved] == ([1] if kind == "weights" else []), (
            "no checkpoint of bad values"
        )


def test_export_nonfinite_exports_and_succeeds(
    cli: Cli, odd: Callable[..., Path], home: Path
) -> None:
    done = cli("submit", odd("loss", "export_nonfinite: true"), "--local", "--follow", "--json")
    assert (done.code, done.json["state"]) == (0, "SUCCEEDED")
    assert "warning: the training loss is not finite; the model is exported" in done.err
    (metrics,) = home.glob("runs/*/model/metrics.json")
    assert strict(metrics.read_text())["validation"]["loss"] is None
    assert (metrics.parent / "model.pt").is_file()


def test_a_skipped_last_step_is_no_failure(cli: Cli, odd: Callable[..., Path]) -> None:
    done = cli(
        "submit", odd("loss", "skip_nonfinite: 2", bad_from=1), "--local", "--follow", "--json"
    )
    assert (done.code, done.json["state"]) == (0, "SUCCEEDED")


def test_a_run_that_skips_all_steps_fails(cli: Cli, odd: Callable[..., Path]) -> None:
    done = cli("submit", odd("loss", "skip_nonfinite: 2"), "--local", "--follow", "--json")
    assert done.code == 4
    assert "its training loss is not finite" in done.json["reason"]
