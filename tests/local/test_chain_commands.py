"""Commands on a real local run of three attempts, whose ranks were killed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from support.jobs import Cli, until
from support.local_runs import LOG_EVERY_STEP

pytestmark = pytest.mark.processes

JOB = """\
name: small
code: {task: "small:Small"}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 2}
train: {steps: 30, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 5 steps}
limits: {recover: {attempts: 3}}
"""
TASK = '''
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from cloudtrain_runtime import Task, context

class Small(Task):
    """Slow steps. Rank 1 is killed once in the step after 8, and once in the step after 17."""

    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        return {"train": [torch.randn(3) for _ in range(64)]}

    def loss(self, model, batch):
        place = context()
        time.sleep(0.05)
        mark = Path(f"MARKS/{place.step}")
        if place.rank == 1 and place.step in (8, 17) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()
'''


def test_commands_take_three_attempts_as_one_run(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    path = job(JOB, small_py=TASK.replace("MARKS", str(marks)))
    run = cli("submit", path, "--local", "--json", *LOG_EVERY_STEP).json["run"]
    until(lambda: cli("status", run, "--json").json["exit_code"] is not None, seconds=240)

    status = cli("status", run, "--json").json
    assert (status["run"], status["state"], status["last_step"]) == (run, "SUCCEEDED", 30)
    attempts = status["attempts"]
    assert [each["state"] for each in attempts] == ["INTERRUPTED", "INTERRUPTED", "SUCCEEDED"]
    assert [each["checkpoint_step"] for each in attempts] == [5, 15, 30]
    assert [each["run"] for each in cli("list", "--json").json["runs"]] == [run]

    # Steps 6 to 8 and 16 to 17 were repeated, and have one value each.
    metrics = cli("metrics", run, "--json").json["metrics"]
    assert [each["step"] for each in metrics["train/loss"]] == list(range(1, 31))
    assert cli("logs", run).out.count("resumed from step") == 2

    found = cli("costs", run, "--json").json
    seconds = sum(map(_seconds, attempts))
    assert found["seconds"] == pytest.approx(seconds, abs=0.001)
    paid = {each["kind"]: each["seconds"] for each in found["entries"]}
    waiting = paid.pop("waiting")
    assert sum(paid.values()) == pytest.approx(seconds, abs=0.01)
    between = _seconds({"started": attempts[0]["started"], "ended": attempts[-1]["ended"]})
    assert waiting >= between - seconds - 0.01
    assert min(paid["training"], paid["repeated"], paid["restart"]) > 0
    assert [each["attempt"] for each in found["attempts"]] == [1, 2, 3]

    longer = cli("resume", run, "--set", "train.steps=31", "--follow", "--json").json
    assert (longer["state"], longer["first_step"]) == ("SUCCEEDED", 30)
    assert [each["run"] for each in longer["attempts"]] == [longer["run"]]
    refused = cli("rm", run, "--yes")
    assert f"cloudtrain rm {run} {longer['run']}" in refused.err
    assert cli("rm", run, longer["run"], "--yes").code == 0
    assert cli("list", "--json").json["runs"] == []


def _seconds(attempt: dict[str, str]) -> float:
    ended, started = (datetime.fromisoformat(attempt[name]) for name in ("ended", "started"))
    return (ended - started).total_seconds()
