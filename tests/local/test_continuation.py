"""Local runs that share a checkpoint folder with other runs, and with cloudtrain 0.1."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Path of a job.yaml that saves to the folder `checkpoints` beside it."""
    for name in ("small.py", "job.yaml"):
        shutil.copy(GOLDEN / name, tmp_path)
    return tmp_path / "job.yaml"


@pytest.mark.promise
def test_runs_that_share_a_folder_keep_their_trainings_apart(cli: Cli, shared: Path) -> None:
    first = cli("submit", shared, "--local", "--follow", "--json")
    assert first.code == 0, first.err
    run = first.json["run"]

    other = ("--set", "train.seed=1", "--set", "train.learning_rate=0.5")
    refused = cli("submit", shared, "--local", *other)
    assert refused.code == 2
    assert "another training's" in refused.err
    assert "train.learning_rate is 0.05 there and 0.5 here" in refused.err
    assert f"--set checkpoint.resume={run}" in refused.err
    assert any(
        "another training's" in warning
        for warning in cli("plan", shared, "--local", *other, "--json").json["warnings"]
    )

    named = cli("submit", shared, "--local", *other, "--set", f"checkpoint.resume={run}", "--set", "train.steps=5",
                "--set", "checkpoint.uri=elsewhere", "--follow", "--json")  # fmt: skip
    assert (named.code, named.json["last_step"]) == (0, 5)

    again = cli("plan", shared, "--local", "--json").json
    assert any("nothing is left to train" in warning for warning in again["warnings"])
    longer = ("--set", "train.steps=6", "--set", "limits.retries=1")
    plan = cli("plan", shared, "--local", *longer, "--json").json
    assert any(line.startswith(f"continues from step 4 of run {run}") for line in plan["decisions"])
    second = cli("submit", shared, "--local", *longer, "--follow", "--json")
    assert (second.code, second.json["last_step"]) == (0, 6)
    saved = cli("checkpoints", shared.parent / "checkpoints", "--json").json["checkpoints"]
    assert {entry["run"]: entry["step"] for entry in saved} == {run: 4, second.json["run"]: 6}, (
        "none is deleted"
    )


def test_a_run_continues_from_a_checkpoint_of_01(cli: Cli, shared: Path) -> None:
    shutil.copytree(GOLDEN / "cloudtrain-0.1", shared.parent / "checkpoints")
    done = cli("submit", shared, "--local", "--set", "train.steps=6", "--follow", "--json")
    assert (done.code, done.json["last_step"]) == (0, 6)
    assert "does not name its training (cloudtrain 0.1 saved it)" in done.err
