"""Fixtures of tests that run jobs with real processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SMALL = """\
name: small
code: {task: "small:Small", args: ARGS}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
train: {epochs: 3, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 2 steps}
"""
TASK = '''
import os, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Small(Task):
    """Linear regression with 46 samples. Steps can be slow, and one rank can fail or hang at one step."""

    def __init__(self, seconds=0.0, fail_at=None, fail_rank=0, only_first_try=False, hang=False, double=False):
        self.dtype = torch.float64 if double else torch.float32
        self.seconds, self.fail_at, self.fail_rank = seconds, fail_at, fail_rank
        self.only_first_try, self.hang = only_first_try, hang

    def model(self):
        return nn.Linear(3, 1).to(self.dtype)

    def datasets(self):
        inputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        part = lambda first, last: torch.utils.data.Subset(data, range(first, last))
        return {"train": part(0, 46), "test": part(46, 50)}

    def loss(self, model, batch):
        place = context()
        time.sleep(self.seconds)
        should_fail = place.rank == self.fail_rank and place.step == self.fail_at
        while should_fail and self.hang:
            time.sleep(60)
        if should_fail and not (self.only_first_try and place.restarts):
            raise ValueError("the loss of this rank is broken on purpose")
        return F.mse_loss(model(batch[0]), batch[1])
'''


@pytest.fixture
def small(job: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a small job. Its keyword arguments become code.args."""

    def write(**arguments: object) -> Path:
        text = ", ".join(f"{name}: {str(value).lower()}" for name, value in arguments.items())
        return job(SMALL.replace("ARGS", f"{{{text}}}"), small_py=TASK)

    return write


@pytest.fixture(autouse=True)
def _kill_remaining_processes(tmp_path: Path) -> Iterator[None]:
    """Kill processes of a failed test after its end: those with a folder below `tmp_path`."""
    yield
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            inside = process.environ().get("CLOUDTRAIN_INSTANCE_FOLDER", "")
        except psutil.Error:
            continue
        if (
            str(tmp_path) in line or inside.startswith(str(tmp_path))
        ) and process.pid != os.getpid():
            process.kill()
