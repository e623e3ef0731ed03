"""Chains of local runs whose training waits at chosen steps, so that its processes can be killed there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cloudtrain.errors import EXIT_DONE, EXIT_RUN_FAILED
from cloudtrain.features.recovery import service
from cloudtrain.features.recovery.stored_chain import StoredChain
from support.jobs import Cli, processes_of, until

STEPS = 24
JOB = """\
name: chained
code: {{task: "chained:Chained", args: {args}}}
cluster: {{instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}}
train: {{steps: 24, batch_size: 4, learning_rate: 0.05}}
checkpoint: {{every: 2 steps}}
"""
TASK = '''
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Chained(Task):
    """Linear regression. After some steps it waits for a file, kills its own rank, or fails; its steps can be slow."""

    def __init__(self, marks, holds=(), kills=(), kills_always=(), fails=(), pace=0.0):
        self.marks, self.pace = Path(marks), pace
        self.holds, self.kills, self.kills_always, self.fails = holds, kills, kills_always, fails

    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}

    def loss(self, model, batch):
        step = context().step
        if self.pace and not (self.marks / "go").exists():
            time.sleep(self.pace)
        if step in self.fails:
            raise ValueError("broken on purpose")
        if step in self.kills and not (self.marks / f"killed-{step}").exists():
            (self.marks / f"killed-{step}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step in self.kills_always:
            os.kill(os.getpid(), signal.SIGKILL)
        if step in self.holds and not (self.marks / f"go-{step}").exists():
            part = self.marks / f"part-{step}"
            part.write_text(str(os.getpid()))
            part.rename(self.marks / f"at-{step}")
            while not (self.marks / f"go-{step}").exists():
                time.sleep(0.01)
        return F.mse_loss(model(batch[0]), batch[1])
'''


@dataclass(frozen=True)
class Chains:
    """The chains of a test.

    Attributes:
        cli: Runs a command of cloudtrain.
        folder: Folder for the job and its marks.
    """

    cli: Cli
    folder: Path

    @property
    def marks(self) -> Path:
        """The folder of the files by which the training and the test wait for each other."""
        return self.folder / "marks"

    def submit(self, *options: str, backend: str = "local", **arguments: Any) -> str:
        """Submit a job with `--recover` unless options say otherwise; return the run id.

        Args:
            options: Options of the command.
            backend: Where it runs.
            arguments: Those of the Task.
        """
        folder = self.folder / "job"
        for each in (folder, self.marks):
            each.mkdir(exist_ok=True)
        (folder / "chained.py").write_text(TASK)
        given = json.dumps({"marks": str(self.marks), **arguments})
        (folder / "job.yaml").write_text(JOB.format(args=given))
        chosen = options or ("--recover",)
        done = self.cli("submit", folder / "job.yaml", "--backend", backend, "--json", *chosen)
        assert done.code in (EXIT_DONE, EXIT_RUN_FAILED), done.err
        return str(done.json["run"])

    def wait_at(self, step: int, stored: StoredChain | None = None) -> int:
        """Wait until the training waits after a step; return the process id of its rank.

        Args:
            step: The step.
            stored: Its chain, if the newest checkpoint before the step must be complete, too.
        """
        mark = self.marks / f"at-{step}"
        until(mark.exists)
        if stored is not None:
            run = stored.home / "runs" / stored.read().newest.run
            saved = run / "checkpoints" / f"step-{step - step % 2:08}" / "manifest.json"
            until(saved.exists)
        return int(mark.read_text())

    def release(self, step: int) -> None:
        """Let the training take the step at which it waits."""
        (self.marks / f"go-{step}").touch()

    def release_all(self) -> None:
        """Let the training take all steps, at full speed."""
        self.marks.mkdir(exist_ok=True)
        (self.marks / "go").touch()

    def end_of(self, run: str) -> dict[str, Any]:
        """Wait for the end of a chain and of its controller; return what `status --json` prints."""

        def ended() -> Any:
            found = self.cli("status", run, "--json").json
            return found if found["exit_code"] is not None else None

        found = dict(until(ended))
        until(lambda: not controllers_of(run.rpartition(":")[2]))
        return found


def stored_chain(run: str, home: Path | None = None) -> StoredChain:
    """Return the folder of the chain that begins with a run."""
    stored = StoredChain.find(run, home)
    assert stored is not None, run
    return stored


def controllers_of(chain: str) -> list[psutil.Process]:
    """Return the controllers of a chain."""
    return _processes(service.MODULE, chain)


def supervisors_of(run: str) -> list[psutil.Process]:
    """Return the supervisor of a run, if it lives."""
    return _processes("cloudtrain.backends.container", run)


def supervisor_of(run: str) -> psutil.Process:
    """Return the supervisor of a run."""
    (found,) = supervisors_of(run)
    return found


def host_of(run: str) -> psutil.Process:
    """Return the process of the only host of a run."""
    (found,) = supervisor_of(run).children()
    return found


def ranks_of(run: str) -> list[psutil.Process]:
    """Return the processes of a run that train: each leads a process group, and has no children."""
    found = []
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            is_agent = "cloudtrain_runtime.launcher.agent" in process.cmdline()
            if is_agent and os.getpgid(process.pid) == process.pid and not process.children():
                found.append(process)
    return found


def kill(process: psutil.Process | int) -> None:
    """Kill a process by SIGKILL, and wait until it has ended."""
    killed = psutil.Process(process) if isinstance(process, int) else process
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: not _is_alive(killed))


def kill_controller(chain: str) -> None:
    """Kill the controller of a chain."""
    (controller,) = controllers_of(chain)
    kill(controller)
    # The lock in S3 belongs to a process that has ended when there is no process of this id.
    until(lambda: not psutil.pid_exists(controller.pid))


def weights_in(folder: Path) -> str:
    """Return a digest of the weights that a run has exported into a folder."""
    import torch

    saved = torch.load(folder / "model.pt", weights_only=True)
    digest = hashlib.sha256()
    for name in sorted(saved):
        digest.update(name.encode())
        digest.update(saved[name].numpy().tobytes())
    return digest.hexdigest()


def _processes(module: str, last: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if module in words and words[-1].endswith(last):
            found.append(process)
    return found


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
