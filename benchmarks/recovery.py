"""Measure the time from SIGKILL of a worker to the next step, and to the first step: cloudtrain and torchrun.

    .venv/bin/python benchmarks/recovery.py [--rounds 7] [--fresh] [--write FILE]

Two ranks on the CPU train a small model with DDP and Gloo; rank 0 writes the time of each step to a file. After some
steps rank 1 is killed, the group starts again, and ends by itself. torchrun runs a script, cloudtrain a Task with the
same model, optimizer and data. The variants alternate. `torchrun`, too, gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
because without it Gloo does not recover from a restart (pytorch#135712).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import BIN, Benchmark, Figures, Peer, Session, alternate, clean_environ, table

_COMMON = """
import os, sys, time
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

class Optimizer(torch.optim.AdamW):
    # AdamW that writes the time of each step of rank 0, and at first which worker this is.
    def __init__(self, parameters):
        super().__init__(parameters)
        self.file = open(os.environ["STEPS"], "a", buffering=1)
        self.restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        is_forked = "cloudtrain_runtime.launcher.fork_server" in sys.modules
        self.file.write(f"worker forked={is_forked} of restart {self.restart}\\n")
        if os.environ["RANK"] == "1":
            self.file.write(f"pid {os.getpid()} of restart {self.restart}\\n")

    def step(self, closure=None):
        super().step(closure)
        if os.environ["RANK"] == "0":
            self.file.write(f"step {time.time()} of restart {self.restart}\\n")
        time.sleep(0.01)
"""
SCRIPT = (
    _COMMON
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(make_model())
optimizer = Optimizer(model.parameters())
for step in range(STEPS):
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
os._exit(0)  # torch's shutdown with Gloo sometimes aborts, and is not measured
"""
)
TASK = (
    _COMMON
    + """
from cloudtrain_runtime import Task
from torch.utils.data import TensorDataset

class Recovery(Task):
    def model(self):
        return make_model()

    def datasets(self):
        return {"train": TensorDataset(torch.randn(1024, 64))}

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def optimizer(self, model):
        return Optimizer(model.parameters())
"""
)
STEPS = 200
JOB = f"""
name: recovery
code: {{task: "task:Recovery", env: {{OMP_NUM_THREADS: 1}}}}
cluster: {{instance_type: ml.p4d.24xlarge, processes_per_instance: 2}}
train: {{steps: {STEPS}, batch_size: 16, learning_rate: 0.001}}
checkpoint: {{every: {10 * STEPS} steps}}
limits: {{retries: 3}}
"""
STEPS_BEFORE_KILL = 20
_TIMEOUT_SECONDS = 120


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="the same model, optimizer and data in a script under `torchrun --max-restarts`",
    goal="0.65 times torchrun from SIGKILL to the next step, 0.80 times to the first step",
    mechanism="the Task's workers were forked from one import of torch, before and after the restart, and no others",
    options={"fresh": (False, "also with a new interpreter for each worker")},
    packages=("torch",),
)


def peer(
    session: Session, name: str, argv: list[str], folder: Path, *, is_forked: bool, goal: str = ""
) -> Peer:
    """Return a command that trains; `is_forked` says whether its workers are forked from one import of torch."""
    environ = clean_environ(
        CLOUDTRAIN_HOME=f"{folder}/home", STEPS=f"{folder}/steps", OMP_NUM_THREADS="1"
    )
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    steps, log = folder / "steps", folder / "log"

    def run() -> Figures:
        steps.unlink(missing_ok=True)
        began = time.time()
        with log.open("w") as output:
            running = subprocess.Popen(argv, cwd=folder, env=environ, stdout=output, stderr=output)
            first = wait_for_steps(running, steps, restart=0, count=STEPS_BEFORE_KILL)[0]
            victim = next(
                line.split()[1] for line in steps.read_text().splitlines() if line.startswith("pid")
            )
            killed = time.time()
            os.kill(int(victim), signal.SIGKILL)
            after = wait_for_steps(running, steps, restart=1, count=1)[0]
            if running.wait(_TIMEOUT_SECONDS) != 0:
                sys.exit(f"{name} failed:\n{log.read_text()[-3000:]}")
        workers = sorted(
            line for line in steps.read_text().splitlines() if line.startswith("worker")
        )
        wanted = [f"worker forked={is_forked} of restart {restart}" for restart in (0, 0, 1, 1)]
        session.require(workers == wanted, f"{name}: workers {workers}\n{log.read_text()[-3000:]}")
        return {"first step": first - began, "recovery": after - killed}

    return Peer(name, run, goal)


def wait_for_steps(
    running: subprocess.Popen[bytes], path: Path, *, restart: int, count: int
) -> list[float]:
    """Return the times of the first steps since a restart, once there are so many."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.is_file() else []
        found = [
            float(x.split()[1])
            for x in lines
            if x.startswith("step") and x.endswith(f"of restart {restart}")
        ]
        if len(found) >= count:
            return found
        if running.poll() is not None:
            break
        time.sleep(0.01)
    running.terminate()
    sys.exit(
        f"no {count} steps after restart {restart}:\n{path.with_name('log').read_text()[-3000:]}"
    )


def measure(session: Session) -> list[str]:
    """Return both tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT.replace("STEPS)", f"{STEPS})"))
        (folder / "task.py").write_text(TASK)
        (folder / "job.yaml").write_text(JOB)
        torchrun = [str(BIN / "torchrun"), "--nproc-per-node=2", "--max-restarts=3", "train.py"]
        submit = [str(BIN / "cloudtrain"), "submit", "job.yaml", "--local", "--follow"]
        submit += ["--set", f"code.env.STEPS={folder / 'steps'}"]
        own, goal = "`cloudtrain submit --local`", "0.65 and 0.80 x torchrun"
        peers = [
            peer(session, "`torchrun --max-restarts`", torchrun, folder, is_forked=False),
            peer(session, own, submit, folder, is_forked=True, goal=goal),
        ]
        if session.options.fresh:
            fresh = "CLOUDTRAIN_WORKER_START=fresh"
            command = [*submit, "--set", f"code.env.{fresh}"]
            peers.append(peer(session, f"the same, `{fresh}`", command, folder, is_forked=False))
        found = alternate(peers, session.rounds)
    lines = table(
        "SIGKILL of one of two workers to the next step",
        found,
        base=peers[0].name,
        figure="recovery",
    )
    return [
        *lines,
        "",
        *table("command to the first step", found, base=peers[0].name, figure="first step"),
    ]


if __name__ == "__main__":
    BENCHMARK.main(measure)
