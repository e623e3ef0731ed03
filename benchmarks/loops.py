"""Compare cloudtrain's training loop with a plain one, Lightning's two and Accelerate's: samples per second.

    .venv/bin/python benchmarks/loops.py [--rounds 7] [--only mlp-1] [--loops hand,cloudtrain] [--write FILE]

All loops use the same models, data, batches and optimizer, one thread per rank, and Gloo. The models are an MLP of 0.1
M parameters, whose steps are mostly overhead, and a GPT of 10.9 M. The MLP reads a TensorDataset (mlp) or a custom
dataset class (rows). In each round, every loop is started once. Then the loops run short turns while all others wait.
Each turn starts with another loop. The ratio of a round is that of the medians of its turns. The tables show the median
over the rounds. The losses of all loops are compared step by step, so that the work is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from measure import describe_machine, replace_marked

HERE = Path(__file__).resolve().parent
NAMES = {
    "hand": "by hand, torch alone",
    "cloudtrain": "cloudtrain's `Task` loop",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "trainer": "Lightning Trainer",
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"kind": "mlp", "batch_size": 32, "warm": 20, "counted": 200, "turns": 9},
    "rows": {"kind": "rows", "batch_size": 32, "warm": 20, "counted": 200, "turns": 9},
    "gpt": {"kind": "gpt", "batch_size": 2, "warm": 2, "counted": 10, "turns": 5},
}
"""Steps of a turn: warm-up steps and measured steps, with the same number of log lines in each turn."""

_TOLERANCE = 1e-3
_JOB = """
name: loops
code: {{task: 'loop_work:Measured', args: {{settings: '{settings}'}}}}
cluster: {{instance_type: ml.p4d.24xlarge, processes_per_instance: {ranks}}}
train: {{steps: {steps}, batch_size: {batch_size}, seed: 0}}
checkpoint: {{every: 1h}}
"""


@dataclass
class Started:
    """The processes of one loop: a pipe to each that starts a turn, and one from each that returns its seconds."""

    name: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    go: list[int] = field(default_factory=list)
    done: list[IO[str]] = field(default_factory=list)

    def take_turn(self) -> float:
        """Run one turn on all ranks; return its seconds on rank 0."""
        for pipe in self.go:
            os.write(pipe, b"\n")
        seconds = [pipe.readline() for pipe in self.done]
        if not all(seconds):
            sys.exit(f"{self.name} ended before its last turn: see its output above")
        return float(seconds[0])

    def finish(self) -> list[list[float]]:
        """Wait until the processes end; return the losses of each rank."""
        losses: list[list[float]] = [json.loads(pipe.readline()) for pipe in self.done]
        for process in self.processes:
            if process.wait(300) != 0:
                sys.exit(f"{self.name} has failed")
        return losses

    def end(self) -> None:
        """Kill remaining processes and close the pipes."""
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in self.go:
            os.close(pipe)
        for file in self.done:
            file.close()


def start(name: str, ranks: int, folder: Path) -> Started:
    """Start the ranks of a loop; they wait before their first step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = Started(name)
    for rank in range(ranks):
        go_read, go_write = os.pipe()
        done_read, done_write = os.pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GO_FD": go_read, "DONE_FD": done_write}
        own = {key: str(value) for key, value in place.items()}
        own |= {"TORCHELASTIC_RUN_ID": "loops", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
        own |= {"OMP_NUM_THREADS": "1", "CLOUDTRAIN_ML_ROOT": str(folder / "ml"), "PYTHONPATH": str(HERE)}
        with (folder / f"{name}-{rank}.log").open("w") as log:
            started.processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "loop_work.py"), name, str(folder / "settings.json")],
                    cwd=folder / "code",
                    env={**os.environ, **own},
                    stdout=log,
                    stderr=log,
                    pass_fds=(go_read, done_write),
                )
            )
        os.close(go_read)
        os.close(done_write)
        started.go.append(go_write)
        started.done.append(os.fdopen(done_read))
    return started


def prepare(settings: Mapping[str, Any], ranks: int, folder: Path) -> None:
    """Write the files that the loops read: the settings, and for cloudtrain the files of a host."""
    import cloudtrain
    from cloudtrain_runtime.contract import MlTree

    work = folder / "code"
    work.mkdir()
    text = json.dumps(settings)
    (folder / "settings.json").write_text(text)
    (work / "loop_work.py").write_text((HERE / "loop_work.py").read_text())
    steps = settings["turns"] * (settings["warm"] + settings["counted"]) + 1
    job = _JOB.format(settings=text, ranks=ranks, steps=steps, batch_size=settings["batch_size"])
    (work / "job.yaml").write_text(job)
    tree = MlTree(folder / "ml")
    for place in (tree.run_config.parent, tree.heartbeats, tree.model, tree.output_data):
        place.mkdir(parents=True, exist_ok=True)
    tree.run_config.write_text(cloudtrain.plan(work / "job.yaml", local=True).config.to_json())


def play_round(
    names: list[str], settings: Mapping[str, Any], ranks: int, first: int
) -> tuple[dict[str, list[float]], float]:
    """Start every loop and run their turns; return seconds per turn, and the largest difference of a loss."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(settings, ranks, folder)
        started: list[Started] = []
        try:
            started += [start(each, ranks, folder) for each in names]
            seconds: dict[str, list[float]] = {each: [] for each in names}
            for turn in range(settings["turns"]):
                at = (first + turn) % len(started)
                for each in started[at:] + started[:at]:
                    seconds[each.name].append(each.take_turn())
            losses = {each.name: each.finish() for each in started}
        except (SystemExit, BrokenPipeError):
            for log in sorted(folder.glob("*.log")):
                print(f"--- {log.stem}\n{log.read_text()[-1500:]}")
            raise
        finally:
            for each in started:
                each.end()
    return seconds, _difference(losses)


def _difference(losses: Mapping[str, list[list[float]]]) -> float:
    """Return the largest difference of a loss from that of the plain loop, over all loops, ranks and steps."""
    base = next(iter(losses.values()))
    return max(
        abs(one - other)
        for ranks in losses.values()
        for own, theirs in zip(ranks, base, strict=True)
        for one, other in zip(own, theirs, strict=True)
    )


def measure(model: str, ranks: int, names: list[str], rounds: int) -> list[str]:
    """Return a Markdown table of the loops on one model and number of ranks."""
    settings = MODELS[model]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    worst = 0.0
    for turn in range(rounds):
        seconds, difference = play_round(names, settings, ranks, turn)
        worst = max(worst, difference)
        if difference > _TOLERANCE:
            sys.exit(f"{model}, {ranks} ranks: losses differ by {difference:.6f}, so the loops differ in their work")
        base = statistics.median(seconds[names[0]])
        for name in names:
            ratios[name].append(base / statistics.median(seconds[name]))
            samples = settings["counted"] * settings["batch_size"] * ranks
            rates[name].append(samples / statistics.median(seconds[name]))
    per_sample = 1000 * settings["batch_size"] * ranks
    lines = [
        f"| {model}, {_ranks(ranks)} | samples/s | ms per step | x by hand | min to max |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        rate = statistics.median(rates[name])
        spread = f"{min(ratios[name]):.3f} to {max(ratios[name]):.3f}"
        ratio = statistics.median(ratios[name])
        lines.append(f"| {NAMES[name]} | {rate:,.0f} | {per_sample / rate:.3f} | {ratio:.3f} | {spread} |")
    return [*lines, "", f"Losses differ by {worst:.6f} at most.", ""]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each table")
    parser.add_argument("--only", default="mlp-1,mlp-2,rows-1,rows-2,gpt-1,gpt-2", help="tables: model and ranks")
    parser.add_argument("--loops", default=",".join(NAMES), help="loops; the others are compared with the first")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    options = parser.parse_args()
    lines: list[str] = []
    for table in options.only.split(","):
        model, _, ranks = table.partition("-")
        found = measure(model, int(ranks), options.loops.split(","), options.rounds)
        print("\n".join(found), flush=True)
        lines += found
    machine = f"{describe_machine()}, torch {torch.__version__}"
    lines.append(f"Medians of {options.rounds} rounds on {machine}. Faster than by hand is above 1.")
    print(lines[-1])
    if options.write is not None:
        replace_marked(options.write, "\n".join(lines))


if __name__ == "__main__":
    main()
