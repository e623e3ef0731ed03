"""`costs RUN` of real runs whose ranks were killed: its sums, compared with a count of their events."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli
from support.local_runs import LOG_EVERY_STEP

pytestmark = pytest.mark.processes

JOB = """\
name: small
code: {task: "small:Small"}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 2}
train: {steps: 30, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 5 steps}
limits: {retries: 2}
"""
TASK = '''
import os, signal, time
import torch
from torch import nn
from cloudtrain_runtime import Task, context

class Small(Task):
    """Slow steps. Rank 1 is killed in the step after 8 of its first try, and after 17 of its second."""

    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        return {"train": [torch.randn(3) for _ in range(64)]}

    def loss(self, model, batch):
        place = context()
        time.sleep(0.05)
        if place.rank == 1 and (place.restarts, place.step) in ((0, 8), (1, 17)):
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()
'''


def test_killed_ranks_of_a_local_run_by_hand(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, small_py=TASK)
    done = cli("submit", path, "--local", "--follow", "--json", *LOG_EVERY_STEP)
    assert done.code == 0, done.err
    run = done.json["run"]
    found = cli("costs", run, "--json").json
    status = cli("status", run, "--json").json

    # The sums are the run's seconds from its start to its end.
    started, ended = (_time(status[name]) for name in ("started", "ended"))
    seconds = {each["kind"]: each["seconds"] for each in found["entries"]}
    assert found["seconds"] == pytest.approx(ended - started, abs=0.001)
    assert sum(seconds.values()) == pytest.approx(ended - started, abs=0.01)
    assert found["interruptions"] == 2
    assert (found["cost_usd"], found["billed_seconds"]) == (0, 0)

    # Counted by hand on the events of rank 0.
    folder = Path(status["artifacts"]["folder"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    begins = [index for index, each in enumerate(events) if each["event"] == "started"]
    tries = [events[one:other] for one, other in zip(begins, [*begins[1:], None], strict=True)]
    first_steps = [_of(each, "step")[0]["time"] for each in tries]
    # The launcher reports no moment of a failure after which it starts the ranks again.
    deaths = [_of(each, "step")[-1]["time"] for each in tries[:2]]
    kept = [
        _kept_until(_of(tries[0], "checkpoint")[-1]),
        _kept_until(_of(tries[1], "checkpoint")[-1]),
    ]
    assert [_of(each, "started")[0]["step"] for each in tries] == [0, 5, 15]
    lost = deaths[0] - kept[0] + deaths[1] - kept[1]
    assert seconds["repeated"] == pytest.approx(lost, abs=0.01)
    assert lost > 0.1
    again = first_steps[1] - deaths[0] + first_steps[2] - deaths[1]
    assert seconds["restart"] == pytest.approx(again, abs=0.01)
    assert seconds["start"] == pytest.approx(first_steps[0] - started, abs=0.01)
    # 30 steps of 0.05 s at least, without the three first ones.
    assert seconds["training"] > 26 * 0.05
    assert _of(tries[2], "finished")[0]["time"] > first_steps[2]

    shown = cli("costs", run)
    assert f"run            local:{run}" in shown.out
    assert cli("status", run).out.count("\ntime ") == 1


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in events if each["event"] == kind]


def _kept_until(checkpoint: dict[str, Any]) -> float:
    """Return when the copy for a checkpoint was made: what was trained while it was written is not in it."""
    written = checkpoint["seconds"] - checkpoint["stall_seconds"]
    return float(checkpoint["time"] - written)
