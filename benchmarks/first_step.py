"""Measure the time from the command to the first training step, and its parts: cloudtrain and plain torchrun.

    .venv/bin/python benchmarks/first_step.py [--rounds 7] [--traced 3] [--write FILE]

Two ranks on the CPU with DDP and Gloo. A Task (the example gpt-stdlib) is compared with a hand-written script for the
same work, and the example script-ddp with itself; the variants alternate. The clock stops when the line of the first
step is read from the command's output. The parts are measured in separate turns, in which each process records when it
reaches certain functions (see startup_trace/sitecustomize.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import BIN, REPOSITORY, Command, describe_machine, replace_marked, table

EXAMPLES = REPOSITORY / "examples"
HAND_WRITTEN = """
import os

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
task = GPT(layers=2, width=96, heads=4, context_bytes=96, files=60)
torch.manual_seed(0)
model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
data = task.datasets()["train"]
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step, batch in enumerate(loader, 1):
    loss = task.loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"first step: loss {total.item() / 2:.4f}", flush=True)
    if step == 2:
        break
dist.barrier()
os._exit(0)  # torch's shutdown with Gloo sometimes aborts, and is not measured
"""
_ADVANCES = "            sampler.advance()\n"
_PRINT_FIRST_STEP = (
    '            if sampler.step == 1 and dist.get_rank() == 0:\n                print("first step", flush=True)\n'
)
_REPORTS_FORK = """
import multiprocessing
print(f"worker forked={multiprocessing.parent_process() is not None}", flush=True)
"""
"""Added to the Task's module: whether a worker is a fork of the process that has imported torch."""

_TRIES = 3
_TASK, _HAND = "Task, `cloudtrain submit --local`", "the same by hand, `torchrun`"
_SCRIPT, _SAME = "script-ddp, `cloudtrain submit --local`", "the same script, `torchrun`"

OURS = (
    ("the command's interpreter and imports", "planning_inputs.read_job begins"),
    ("validation of the job", "planning_inputs.plan_job begins"),
    ("plan: which code travels, the request", "archive.write_bundle begins"),
    ("bundle", "backend.LocalBackend.submit begins"),
    ("run folder, and the start of the supervisor", "job.run_job begins"),
    ("/opt/ml prepared, code unpacked", "job._Job.start begins"),
    ("container started: the launcher's interpreter", "process launch"),
    ("launcher, and the interpreters of agent and fork server", "import torch begins"),
    ("`import torch`, in both at the same time", "import torch ends"),
    ("dependencies of DDP and optimizers, in the fork server", "import cloudtrain_runtime.launcher.preload ends"),
    ("rank 0 forked", "worker.run_rank begins"),
    ("process group", "task.load_task begins"),
    ("the user's module", "task.load_task ends"),
    ("datasets, model, DDP, optimizer, checkpoints", "trainer.Trainer.__init__ ends"),
    ("first step", "trainer.Trainer._log begins"),
    ("its line, on the terminal", "seen"),
)
THEIRS = (
    ("torchrun's interpreter", "import torch begins"),
    ("`import torch` in torchrun", "import torch ends"),
    ("torchrun's own imports", "run.run begins"),
    ("rendezvous", "local_elastic_agent.LocalElasticAgent._start_workers begins"),
    ("interpreter of each rank", "import torch begins"),
    ("`import torch` in each rank", "import torch ends"),
    ("the user's module, process group", "distributed_c10d.init_process_group ends"),
    ("model, and DDP with its dependencies", "distributed.DistributedDataParallel.__init__ ends"),
    ("datasets, optimizer, first step, its line", "seen"),
)
"""Parts of a start in order: its name, and the trace entry that ends it."""


@dataclass(frozen=True)
class Way:
    """One command that trains, and how to recognize the line of its first step.

    Attributes:
        sign: Part of the line of the first step.
        goal: Limit of the ratio to torchrun.
        is_forked: Whether both ranks report that they are forks; if not, neither of them may.
    """

    name: str
    argv: list[str]
    cwd: Path
    sign: str
    goal: str = ""
    is_forked: bool = False


def ways(folder: Path) -> list[Way]:
    """Write the files to run; return the commands, each of cloudtrain before the one to compare with."""
    script = (EXAMPLES / "script-ddp" / "train.py").read_text()
    if _ADVANCES not in script:
        sys.exit("the example script-ddp has changed: it has no line where its first step ends")
    (folder / "script").mkdir()
    (folder / "script" / "train.py").write_text(script.replace(_ADVANCES, _ADVANCES + _PRINT_FIRST_STEP))
    (folder / "script" / "job.yaml").write_text((EXAMPLES / "script-ddp" / "job.yaml").read_text())
    (folder / "train.py").write_text(HAND_WRITTEN)
    task = (EXAMPLES / "gpt-stdlib" / "gpt.py").read_text()
    (folder / "gpt.py").write_text(task)
    (folder / "task").mkdir()
    (folder / "task" / "gpt.py").write_text(task + _REPORTS_FORK)
    (folder / "task" / "job.yaml").write_text((EXAMPLES / "gpt-stdlib" / "job.yaml").read_text())
    ranks = ["--set", "cluster.processes_per_instance=2"]
    submit = [str(BIN / "cloudtrain"), "submit", "job.yaml", "--local", "--follow", *ranks]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "train.py"]
    once = ["--set", "code.args.epochs=1"]
    return [
        Way(_TASK, [*submit, "--set", "train.steps=2"], folder / "task", "step      1 ", "0.80", is_forked=True),
        Way(_HAND, torchrun, folder, "first step"),
        Way(_SCRIPT, [*submit, *once], folder / "script", "first step"),
        Way(_SAME, [*torchrun, "--epochs", "1"], folder / "script", "first step"),
    ]


def run_once(way: Way, environ: Mapping[str, str], failed: Counter[str]) -> tuple[int, int]:
    """Run a command to its end; return when it was started and when its first step was seen, in nanoseconds.

    A run that fails is counted in `failed` and repeated: plain torchrun with Gloo sometimes aborts at its exit.
    """
    for _ in range(_TRIES):
        seen, lines = 0, []
        # Checkpoints of torchrun; a run of cloudtrain has its own folder.
        shutil.rmtree(way.cwd / "checkpoints", ignore_errors=True)
        began = time.monotonic_ns()
        with subprocess.Popen(
            way.argv, cwd=way.cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running:
            for line in running.stdout or ():
                lines.append(line)
                if not seen and way.sign in line:
                    seen = time.monotonic_ns()
        if seen:
            if sum("worker forked=True" in line for line in lines) != (2 if way.is_forked else 0):
                sys.exit(f"{way.name}: the workers must be forked={way.is_forked}:\n{''.join(lines)[-3000:]}")
            return began, seen
        failed[way.name] += 1
    sys.exit(f"{way.name} has printed no step:\n{''.join(lines)[-3000:]}")


def trace(way: Way, environ: Mapping[str, str], folder: Path, failed: Counter[str]) -> list[tuple[int, str]]:
    """Run a command once with a trace; return its entries and times, including the start and the first step."""
    path = folder / "trace"
    path.unlink(missing_ok=True)
    traced = {**environ, "PYTHONPATH": str(REPOSITORY / "benchmarks" / "startup_trace"), "TRACE_FILE": str(path)}
    began, seen = run_once(way, {**traced, "CLOUDTRAIN_PASS_ENVIRONMENT": "PYTHONPATH,TRACE_FILE"}, failed)
    entries = [line.split(" ", 2) for line in path.read_text().splitlines()]
    return sorted([(began, "began"), (seen, "seen"), *((int(moment), name) for moment, _, name in entries)])


def split(entries: list[tuple[int, str]], parts: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """Return the seconds of each part. Exit if the trace lacks an entry, which would make its parts wrong."""
    found: dict[str, float] = {}
    before = entries[0][0]
    for title, end in parts:
        moment = next((moment for moment, name in entries if name == end and moment >= before), None)
        if moment is None:
            sys.exit(f"the trace has no entry {end!r} after that of the previous part; update OURS or THEIRS")
        found[title] = (moment - before) / 1e9
        before = moment
    return found


def parts_table(title: str, turns: list[dict[str, float]]) -> list[str]:
    """Return a Markdown table of the parts: the median of each, and its share of the total."""
    total = statistics.median(sum(turn.values()) for turn in turns)
    lines = [f"| {title} | s | share |", "|---|---|---|"]
    for name in turns[0]:
        seconds = statistics.median(turn.get(name, 0.0) for turn in turns)
        lines.append(f"| {name} | {seconds:.2f} | {seconds / total:.0%} |")
    return [*lines, f"| total | {total:.2f} | |"]


def measure(found: list[Way], rounds: int, environ: Mapping[str, str], failed: Counter[str]) -> dict[str, list[float]]:
    """Run the variants alternately, once to warm up and then `rounds` times; return seconds by name."""
    seconds: dict[str, list[float]] = {way.name: [] for way in found}
    for turn in range(rounds + 1):
        for way in found:
            began, seen = run_once(way, environ, failed)
            if turn > 0:
                seconds[way.name].append((seen - began) / 1e9)
    return seconds


def report(found: list[Way], rounds: int, traced: int, folder: Path) -> str:
    """Measure and return the report."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ = {**kept, "CLOUDTRAIN_HOME": f"{folder}/home", "SM_MODEL_DIR": str(folder)}
    environ |= {"OMP_NUM_THREADS": "1", "AWS_EC2_METADATA_DISABLED": "true"}
    failed: Counter[str] = Counter()
    seconds = measure(found, rounds, environ, failed)
    lines = []
    for ours, theirs in (found[:2], found[2:]):
        rows = [Command(way.name, [], folder, way.goal and f"{way.goal} x torchrun") for way in (ours, theirs)]
        lines += [*table(rows, seconds, theirs.name), ""]
    for way, parts in ((found[0], OURS), (found[1], THEIRS)):
        turns = [split(trace(way, environ, folder, failed), parts) for _ in range(traced)]
        lines += [*parts_table(way.name, turns), ""]
    machine = f"{describe_machine()}, torch {torch.__version__}"
    lines.append("In every turn the Task's workers were forked from one import of torch, and no others (checked).")
    lines.append(f"Medians of {rounds} alternating turns, parts of {traced} more, on {machine}.")
    lines += [f"{name}: {count} runs failed and were repeated." for name, count in sorted(failed.items())]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted turns of each variant")
    parser.add_argument("--traced", type=int, default=3, help="further turns that measure the parts")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        text = report(ways(Path(name)), options.rounds, options.traced, Path(name))
    print(text)
    if options.write is not None:
        replace_marked(options.write, text)


if __name__ == "__main__":
    main()
