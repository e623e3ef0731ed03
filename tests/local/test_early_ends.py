"""A rank that ended with exit code 0 while others went on is the cause, in the status and in the explanation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

TASK = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Quiet(Task):
    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        return {"train": TensorDataset(torch.zeros(80, 3))}

    def loss(self, model, batch):
        if context().rank == 1 and context().step == 4:
            os._exit(0)
        return model(batch[0]).square().mean()
"""
UNEVEN = """
import os, torch, torch.distributed as dist
from cloudtrain_runtime import heartbeat

dist.init_process_group("gloo")
for step in range(1, 10 if dist.get_rank() == 1 else 30):
    dist.all_reduce(torch.ones(10))
    heartbeat.tick(step)
"""
PASSES_LOCAL_RANK = """
import os, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""


def submitted(cli: Cli, path: Path) -> tuple[str, dict[str, object]]:
    """Return a failed run's reason and its explanation."""
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4, done.err
    return str(done.json["reason"]), cli("explain", done.json["run"], "--json").json


@pytest.mark.parametrize("instances", [1, 2])
def test_a_rank_with_fewer_batches_is_blamed(
    cli: Cli, job: Callable[..., Path], instances: int
) -> None:
    path = job(
        "name: uneven\ncode: {script: train.py}\n"
        f"cluster: {{instance_type: ml.m5.large, instances: {instances}, processes_per_instance: {2 // instances}}}\n",
        train_py=UNEVEN,
    )
    reason, explained = submitted(cli, path)
    host = f"algo-{instances}"
    assert reason.startswith(f"rank 1 on {host} "), reason
    assert "ended with exit code 0 after step 9" in reason
    if instances == 1:
        assert "while rank 0 waited for it at train.py:7" in reason
    assert (explained["rank"], explained["host"], explained["class"]) == (1, host, "user_code")
    assert "fewer batches" in str(explained["action"])


def test_a_rank_of_a_task_that_exits_is_blamed(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: quiet\ncode: {task: quiet:Quiet}\ntrain: {steps: 8, batch_size: 4}\n"
        "cluster: {instance_type: ml.m5.large, processes_per_instance: 2}\n",
        quiet_py=TASK,
    )
    reason, explained = submitted(cli, path)
    assert reason.startswith("rank 1 on algo-1 (local rank 1) ended with exit code 0 after step 4")
    assert (explained["rank"], explained["class"]) == (1, "user_code")
    assert "os._exit" in str(explained["action"])


def test_the_local_rank_as_rank_is_refused(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: local\ncode: {script: train.py}\n"
        "cluster: {instance_type: ml.m5.large, instances: 2, processes_per_instance: 1}\n",
        train_py=PASSES_LOCAL_RANK,
    )
    reason, explained = submitted(cli, path)
    assert "the script passes rank 0 for rank 1" in reason
    assert "use RANK" in reason
    assert (explained["rank"], explained["place"]) == (1, "train.py:3")
