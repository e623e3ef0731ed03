"""Data workers end before their rank leaves: no exit handler finds one, or waits for one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

JOB = """
name: leaving
code: {task: "small:Leaving", args: {ending: ENDING}}
cluster: {instance_type: ml.m5.large, processes_per_instance: 2}
train: {steps: 30, batch_size: 2, workers: 2, evaluate: {every: 10 steps}}
checkpoint: {every: 1h}
limits: {runtime: 10m}
"""
TASK = """
import atexit, multiprocessing, os, signal
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from cloudtrain_runtime import Task, context


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(8, 1)


def report():
    print("LEFT", len(multiprocessing.active_children()), flush=True)


class Leaving(Task):
    def __init__(self, ending):
        self.ending, self.seen = ending, 0

    def model(self):
        return nn.Linear(1, 1)

    def datasets(self):
        data = TensorDataset(torch.ones(64, 1))
        return {"train": data, "validation": data, "test": Stream()}

    def loss(self, model, batch):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        if context().step == 14:
            self.seen += 1
            if self.seen == 1:
                print("WORKERS", len(multiprocessing.active_children()), flush=True)
                # After the loaders have registered their handlers, so that this one runs before them.
                atexit.register(report)
            if self.ending == "error":
                raise ValueError("on purpose")
            if self.ending == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
        return model(x).square().mean()
"""


@pytest.mark.parametrize(("ending", "code"), [("done", 0), ("error", 4), ("stop", 5)])
def test_no_data_worker_lives_when_exit_handlers_begin(
    cli: Cli, job: Callable[..., Path], ending: str, code: int
) -> None:
    path = job(JOB.replace("ENDING", ending), small_py=TASK)
    done = cli("submit", path, "--local", "--follow", "--json")
    log = cli("logs", done.json["run"], "--raw").out
    assert done.code == code, log
    # Torchrun's agent ends the other rank as soon as one has failed, also in the middle of its exit.
    least = 1 if ending == "error" else 2
    # Of training and validation; the test split comes at the end.
    assert least <= log.count("WORKERS 4") <= 2, log
    assert least <= log.count("LEFT 0") == log.count("LEFT ") <= 2, log
    assert ("Traceback" in log) == (ending == "error"), log


PINNED = """
import atexit, multiprocessing, threading
import torch
from torch.utils.data import TensorDataset
from cloudtrain_runtime.data.loader import Loader, close_loaders
from cloudtrain_runtime.process import fast_exit
from cloudtrain_runtime.process.loader_workers import OutliveStopSignal

# A stand-in for an accelerator, as far as a loader asks for one.
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda _: None
if hasattr(torch, "accelerator"):
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda *_: None
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.Tensor.pin_memory = lambda self, *_: self

fast_exit.register()
batches = []
for _ in range(3):
    loader = Loader(TensorDataset(torch.zeros(64, 2)), batch_size=4, num_workers=2, pin_memory=True,
                    persistent_workers=True, multiprocessing_context="fork", worker_init_fn=OutliveStopSignal())
    batches.append(iter(loader))
    next(batches[-1])
del loader

def report():
    pinning = [each.name for each in threading.enumerate() if "pin" in each.name]
    print("at exit:", len(multiprocessing.active_children()), pinning, flush=True)

atexit.register(report)
print("before:", len(multiprocessing.active_children()), flush=True)
close_loaders()
fast_exit.exit_process(0)
"""


def test_pinned_loaders_end_with_their_threads() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PINNED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before: 6", "at exit: 0 []"]
    assert done.stderr == ""
