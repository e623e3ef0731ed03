"""Measure the time from SIGKILL of a worker to the next step, and to the first step: cloudtrain and torchrun.

    .venv/bin/python benchmarks/recovery.py [--rounds 7] [--fresh] [--write FILE]

Two ranks on the CPU train a small model with DDP and Gloo; rank 0 writes the time of each step to a file. After some
steps rank 1 is killed, the group starts again, and ends by itself. torchrun runs a script, cloudtrain a Task with the
same model, optimizer and data. The variants alternate. `torchrun`, too, gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
because without it Gloo does not recover from a restart (pytorch#135712).

The measured mechanism is the fork of workers from one import of torch. Each worker reports whether it is such a fork;
the benchmark ends with an error where that is not what its variant is meant to measure.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import BIN, Command, describe_machine, replace_marked, table

_COMMON = """
import multiprocessing, os, time
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
        is_forked = multiprocessing.parent_process() is not None
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


@dataclass(frozen=True)
class Times:
    """Seconds of one run."""

    first_step: float
    recovery: float


@dataclass(frozen=True)
class Way:
    """A command that runs the script, and whether its workers are forked from one import of torch."""

    argv: list[str]
    is_forked: bool


def ways(folder: Path, *, fresh: bool) -> dict[str, Way]:
    """Return the commands that run the script, by name."""
    cloudtrain = [str(BIN / "cloudtrain"), "submit", "job.yaml", "--local", "--follow", "--set"]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node=2", "--max-restarts=3", "train.py"]
    steps = f"code.env.STEPS={folder / 'steps'}"
    found = {
        "`torchrun --max-restarts`": Way(torchrun, is_forked=False),
        "`cloudtrain submit --local`": Way([*cloudtrain, steps], is_forked=True),
    }
    if fresh:
        off = "CLOUDTRAIN_WORKER_START=fresh"
        found[f"the same, `{off}`"] = Way([*cloudtrain, steps, "--set", f"code.env.{off}"], is_forked=False)
    return found


def run_once(way: Way, folder: Path, environ: dict[str, str]) -> Times:
    """Run the script until it was killed and has restarted; return the times."""
    argv = way.argv
    steps = folder / "steps"
    steps.unlink(missing_ok=True)
    began = time.time()
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(argv, cwd=folder, env=environ, stdout=log, stderr=log)
        first = wait_for_steps(running, steps, restart=0, count=STEPS_BEFORE_KILL)[0]
        victim = next(line.split()[1] for line in steps.read_text().splitlines() if line.startswith("pid"))
        killed = time.time()
        os.kill(int(victim), signal.SIGKILL)
        after = wait_for_steps(running, steps, restart=1, count=1)[0]
        if running.wait(_TIMEOUT_SECONDS) != 0:
            sys.exit(f"{argv[0]} failed:\n{(folder / 'log').read_text()[-3000:]}")
    check_mechanism(way, steps)
    return Times(first - began, after - killed)


def check_mechanism(way: Way, steps: Path) -> None:
    """Exit unless the workers of both starts were forked or not, as the variant requires."""
    lines = [line for line in steps.read_text().splitlines() if line.startswith("worker")]
    wanted = sorted(f"worker forked={way.is_forked} of restart {restart}" for restart in (0, 0, 1, 1))
    if sorted(lines) != wanted:
        output = "\n".join(lines)
        log = steps.with_name("log").read_text()[-3000:]
        sys.exit(f"{way.argv[0]}: the workers must be forked={way.is_forked}, and were:\n{output}\n{log}")


def wait_for_steps(running: subprocess.Popen[bytes], path: Path, *, restart: int, count: int) -> list[float]:
    """Return the times of the first steps since a restart, once there are so many."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.is_file() else []
        found = [float(x.split()[1]) for x in lines if x.startswith("step") and x.endswith(f"of restart {restart}")]
        if len(found) >= count:
            return found
        if running.poll() is not None:
            break
        time.sleep(0.01)
    running.terminate()
    sys.exit(f"no {count} steps after restart {restart}:\n{path.with_name('log').read_text()[-3000:]}")


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted turns of each variant")
    parser.add_argument("--fresh", action="store_true", help="also with a new interpreter for each worker")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    options = parser.parse_args()
    recovery: dict[str, list[float]] = {}
    first_step: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT.replace("STEPS)", f"{STEPS})"))
        (folder / "task.py").write_text(TASK)
        (folder / "job.yaml").write_text(JOB)
        environ = {**os.environ, "CLOUDTRAIN_HOME": f"{folder}/home", "STEPS": f"{folder}/steps"}
        environ |= {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for turn in range(options.rounds + 1):
            for name_of_way, way in ways(folder, fresh=options.fresh).items():
                times = run_once(way, folder, environ)
                if turn > 0:
                    recovery.setdefault(name_of_way, []).append(times.recovery)
                    first_step.setdefault(name_of_way, []).append(times.first_step)
    base = next(iter(recovery))
    text = "\n".join(
        [
            "From SIGKILL of one of two workers to the next step:",
            "",
            *table(goals(folder, recovery, "0.65 x torchrun"), recovery, base),
            "",
            "From the command to the first step:",
            "",
            *table(goals(folder, first_step, "0.80 x torchrun"), first_step, base),
            "",
            "In every turn the Task's workers were forked from one import of torch, and no others (checked).",
            "",
            f"Medians of {options.rounds} alternating turns on {describe_machine()}, torch {torch.__version__}.",
        ]
    )
    print(text)
    if options.write is not None:
        replace_marked(options.write, text)


def goals(folder: Path, seconds: dict[str, list[float]], goal: str) -> list[Command]:
    """Return the rows of a table. The goal applies to `cloudtrain submit` without options."""
    return [Command(way, [], folder, goal if index == 1 else "") for index, way in enumerate(seconds)]


if __name__ == "__main__":
    main()
