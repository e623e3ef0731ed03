"""Kill training runs repeatedly, resume them with other numbers of ranks, and check that they lose nothing.

    .venv/bin/python benchmarks/kills.py --kills 300 --write benchmarks/results/kills.md

Every run trains a small model, replicated (DDP) or sharded (FSDP2), on 1 to 4 real ranks with Gloo, and saves every
second step to a folder or to an S3 server on loopback. SIGKILL ends a start of a run: one rank or all, at a random
moment, or just before or after a random operation of saving and of deleting old checkpoints. The next start has another
number of ranks. At the end of a run, its log must show every sample of every epoch exactly once, and its weights must
equal those of an uninterrupted run. Each start compares the loaded weights with a checksum from when they were saved.
Any fault is printed, and the exit code is then 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Benchmark, Session, markdown_table, serve_bucket
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import CheckpointConfig, MlTree, RunConfig

LENGTH, BATCH, EPOCHS, EVERY_STEPS, KEEP = 157, 4, 3, 2, 2
MAX_RANKS = 4
START_TIMEOUT_SECONDS = 120.0
RELATIVE_TOLERANCE = 1e-4
ALL_RANKS_SHARE, TIMED_SHARE = 0.3, 0.5
"""Shares of the kills that end all ranks, and that come after a random time."""


@dataclass(frozen=True)
class Case:
    """One run: its parallelism and the location of its checkpoints."""

    name: str
    strategy: str
    root: Path
    uri: str


@dataclass(frozen=True)
class Kill:
    """When a start is killed: `seconds` after its start, or at the n-th storage operation of one rank."""

    rank: int | None
    seconds: float | None = None
    operation: int | None = None

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        when = (
            f"after {self.seconds:.2f} s"
            if self.seconds is not None
            else f"at operation {self.operation}"
        )
        return f"{who} {when}"


@dataclass
class Results:
    """Results of all runs."""

    runs: int = 0
    starts: int = 0
    kills: int = 0
    faults: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    worlds: Counter[int] = field(default_factory=Counter)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="an uninterrupted run on one rank",
    goal="no sample lost or repeated, the same weights, no torn checkpoint accepted, and every run resumes",
    mechanism="SIGKILL ended starts of runs, which later starts continued",
    rounds=0,
    options={
        "kills": (300, "starts to kill"),
        "seed": (0, "of all randomness"),
        "store": ("both", "folder, s3 or both"),
        "strategy": ("both", "ddp, fsdp or both"),
    },
    packages=("torch",),
)


def measure(session: Session) -> list[str]:
    """Run the campaign; return its results, and record the faults."""
    options = session.options
    rng = random.Random(options.seed)  # noqa: S311 (a campaign that can be repeated)
    results = Results()
    stores = ["folder", "s3"] if options.store == "both" else [options.store]
    strategies = ["ddp", "fsdp"] if options.strategy == "both" else [options.strategy]
    started = time.monotonic()
    serving = serve_bucket("kills") if "s3" in stores else contextlib.nullcontext("")
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, serving as s3_uri:
        number = 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while results.kills < options.kills:
            store, strategy = (
                stores[number % len(stores)],
                strategies[number // len(stores) % len(strategies)],
            )
            root = Path(folder) / f"run-{number}"
            uri = f"{s3_uri}/run-{number}" if store == "s3" else (root / "checkpoints").as_uri()
            case = Case(f"run {number} ({strategy}, {store})", strategy, root, uri)
            try:
                complete_run(case, rng, results, options.kills)
            except KeyboardInterrupt:
                break  # report the results so far
            print(
                f"{case.name}: {results.kills} kills, {len(results.faults)} faults so far",
                file=sys.stderr,
                flush=True,
            )
            shutil.rmtree(root)
            number += 1
    session.faults += results.faults
    session.require(results.kills > 0, "no start was killed")
    return report(results, time.monotonic() - started)


def complete_run(case: Case, rng: random.Random, results: Results, enough: int) -> None:
    """Start and kill a run until it completes; then compare its results."""
    world = rng.randint(1, MAX_RANKS)
    number = 0
    unkilled_starts = 0
    while True:
        kill = choose_kill(rng, world) if results.kills < enough else None
        has_ended = start(case, number, world, kill, results)
        number += 1
        if has_ended:
            break
        unkilled_starts = unkilled_starts + 1 if kill is None else 0
        if unkilled_starts > 1 or any(fault.startswith(case.name) for fault in results.faults):
            results.faults.append(f"{case.name}: does not complete")
            return
        world = rng.randint(1, MAX_RANKS)
    results.runs += 1
    results.faults += [f"{case.name}: {fault}" for fault in compare(case, number)]


def choose_kill(rng: random.Random, world: int) -> Kill:
    """Choose when to kill a start."""
    rank = None if rng.random() < ALL_RANKS_SHARE else rng.randrange(world)
    if rng.random() < TIMED_SHARE:
        return Kill(rank, seconds=rng.random() * 2.5)
    return Kill(rank or 0, operation=rng.randint(1, 60))


def start(case: Case, number: int, world: int, kill: Kill | None, results: Results) -> bool:
    """Run the ranks; return whether they completed the training."""
    port = free_port()
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=rank_main, args=(case, number, rank, world, port, kill))
        for rank in range(world)
    ]
    results.starts += 1
    results.worlds[world] += 1
    started = time.monotonic()
    for rank in ranks:
        rank.start()
    if kill is not None and kill.seconds is not None:
        connection.wait([rank.sentinel for rank in ranks], kill.seconds)
        for rank in ranks if kill.rank is None else [ranks[kill.rank]]:
            rank.kill()
    output = case.root / f"start-{number}-output.txt"
    while {rank.exitcode for rank in ranks} in ({None}, {None, 0}):
        time.sleep(0.005)
        if time.monotonic() - started > START_TIMEOUT_SECONDS:
            for rank in multiprocessing.active_children():
                os.kill(rank.pid or 0, signal.SIGUSR1)  # faulthandler writes its stack
            time.sleep(2.0)
            stacks = output.read_text(errors="replace")[-12000:]
            results.faults.append(
                f"{case.name}: start {number} with {world} ranks hangs ({kill}):\n{stacks}"
            )
            break
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if -signal.SIGKILL in codes:
        results.kills += 1
        results.kinds[
            "after a time" if kill is not None and kill.seconds is not None else "at an operation"
        ] += 1
    elif any(codes):
        text = output.read_text(errors="replace")[-1500:]
        results.faults.append(
            f"{case.name}: start {number} with {world} ranks failed ({codes}, {kill}):\n{text}"
        )
    results.resumed += any(
        entry.get("resumed") for entry in read_log(case.root / f"start-{number}-rank-0.jsonl")
    )
    return codes == [0] * world


def rank_main(case: Case, number: int, rank: int, world: int, port: int, kill: Kill | None) -> None:
    """Run one rank of one start."""
    tree = MlTree(case.root / f"ml-{number}")
    checkpoint = CheckpointConfig(case.uri, None, EVERY_STEPS, KEEP, "auto")
    config = RunConfig(
        run=case.root.name,
        task=None,
        script="kills.py",
        args=[],
        requirements=None,
        processes_per_instance=world,
        distribution="torch_distributed",
        max_restarts=0,
        train=None,
        checkpoint=checkpoint,
    )
    tree.run_config.parent.mkdir(parents=True, exist_ok=True)
    mine = tree.run_config.with_suffix(f".{rank}")
    mine.write_text(config.to_json())
    mine.rename(tree.run_config)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CLOUDTRAIN_ML_ROOT": tree.root}
    os.environ |= {name: str(value) for name, value in place.items()}
    output = os.open(
        case.root / f"start-{number}-output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    code = 1
    try:
        if kill is not None and kill.operation is not None and kill.rank == rank:
            kill_at(kill.operation)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        train(case, number, rank, world)
        code = 0
    except BaseException:  # noqa: BLE001 (reported by the exit code)
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def kill_at(operation: int) -> None:
    """Kill this process just before (odd) or after (even) an operation of saving or deleting."""
    from cloudtrain_runtime.checkpoint import storage
    from cloudtrain_runtime.s3 import objects

    count = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if 2 * count > operation and operation % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            value = act(*arguments, **keywords)
            if 2 * count >= operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return run

    for owner, names in (
        (storage.FolderStorage, ("reserve", "commit", "delete", "write", "create")),
        (objects.S3Objects, ("put_new", "put", "delete", "create")),
        (Path, ("rename",)),
        (storage.shutil, ("rmtree",)),
        (storage.os, ("fsync",)),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Random vectors with their indices."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(LENGTH, 16, generator=generator)
        self.targets = self.inputs[:, :1].sin() + self.inputs[:, 1:2]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.targets[index], index


def train(case: Case, number: int, rank: int, world: int) -> None:
    """Train as a user's script does, and log each step's samples."""
    from cloudtrain_runtime import GlobalOrderSampler, checkpoint

    model, optimizer, schedule = make_training(case.strategy)
    # The first start that saves sets the global batch; later ones keep it for any number of ranks.
    sampler = GlobalOrderSampler(LENGTH, batch_size=BATCH, seed=7)
    start = checkpoint.load(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler)
    with (case.root / f"start-{number}-rank-{rank}.jsonl").open("w", buffering=1) as log:
        print(json.dumps({"resumed": start.step, "global": sampler.global_size}), file=log)
        if start.step and abs(start.state["weights"] - weight_sum(model)) > 1e-6 * abs(
            start.state["weights"]
        ):
            print(json.dumps({"torn": [start.state["weights"], weight_sum(model)]}), file=log)
        loader = DataLoader(Samples(), batch_sampler=sampler)
        while sampler.epoch < EPOCHS:
            batches = iter(loader)
            for step in sampler.schedule():
                epoch, seen = sampler.epoch, []
                optimizer.zero_grad()
                for micro in step.micro_batches:
                    inputs, targets, indices = next(batches)
                    seen += indices.tolist()[: micro.count]
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    (loss * micro.count * world / step.samples).backward()
                optimizer.step()
                schedule.step()
                sampler.advance()
                print(json.dumps({"step": sampler.step, "epoch": epoch, "samples": seen}), file=log)
                checkpoint.save(
                    sampler.step,
                    model=model,
                    optimizer=optimizer,
                    schedule=schedule,
                    sampler=sampler,
                    state={"weights": weight_sum(model)},
                )
        print(json.dumps({"ended": sampler.step, "weights": weight_sum(model)}), file=log)
    checkpoint.save(
        sampler.step,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        sampler=sampler,
        force=True,
    )


def make_training(
    strategy: str,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    """Return a model with DDP or FSDP2 (or neither), its optimizer and the schedule of the learning rate."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard  # from torch 2.6 on

        for layer in (each for each in model.children() if isinstance(each, nn.Linear)):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)


@torch.no_grad()
def weight_sum(model: nn.Module) -> float:
    """Return a checksum of all weights."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        total += local.double().abs().sum()
    if any(hasattr(parameter, "_local_tensor") for parameter in model.parameters()):
        dist.all_reduce(total)
    return float(total)


def compare(case: Case, starts: int) -> list[str]:
    """Return the faults of a completed run."""
    faults = []
    lineage: dict[int, tuple[int, list[int]]] = {}
    weights: float | None = None
    global_batch = 1
    for number in range(starts):
        logs = [read_log(path) for path in sorted(case.root.glob(f"start-{number}-rank-*.jsonl"))]
        entries_of_start = [entry for log in logs for entry in log]
        faults += [
            f"start {number} loaded other weights than were saved: {e['torn']}"
            for e in entries_of_start
            if "torn" in e
        ]
        if {e["resumed"] for e in entries_of_start if "resumed" in e} == {0}:
            lineage = {}  # fresh start: earlier ones were killed before their first checkpoint
        global_batch = next((e["global"] for e in entries_of_start if "global" in e), global_batch)
        steps = (
            set.intersection(*({e["step"] for e in log if "step" in e} for log in logs))
            if logs
            else set()
        )
        for step in steps:
            entries = [e for log in logs for e in log if e.get("step") == step]
            lineage[step] = (
                entries[0]["epoch"],
                [index for e in entries for index in e["samples"]],
            )
        weights = next((e["weights"] for log in logs for e in log if "ended" in e), weights)
    for epoch in range(EPOCHS):
        seen = Counter(
            index for at, samples in lineage.values() if at == epoch for index in samples
        )
        lost, repeated = (
            set(range(LENGTH)) - set(seen),
            [index for index, times in seen.items() if times > 1],
        )
        if lost or repeated:
            faults.append(f"epoch {epoch}: {len(lost)} samples lost, {len(repeated)} repeated")
    steps = -(-LENGTH // global_batch) * EPOCHS
    if sorted(lineage) != list(range(1, steps + 1)):
        faults.append(
            f"steps {sorted(set(range(1, steps + 1)) ^ set(lineage))} are missing or too many"
        )
    expected = unkilled_weights(global_batch)
    if weights is None or abs(weights - expected) > RELATIVE_TOLERANCE * abs(expected):
        faults.append(
            f"its weights sum up to {weights}, those of an uninterrupted run to {expected}"
        )
    return faults


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log, which need not exist; a kill may have truncated the last one."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@functools.cache
def unkilled_weights(global_batch: int) -> float:
    """Return the checksum of an uninterrupted run on one rank."""
    from cloudtrain_runtime import GlobalOrderSampler

    model, optimizer, schedule = make_training("none")
    sampler = GlobalOrderSampler(LENGTH, batch_size=global_batch, seed=7, rank=0, world_size=1)
    data = Samples()
    while sampler.epoch < EPOCHS:
        for indices in list(sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data.inputs[indices]), data.targets[indices]).backward()
            optimizer.step()
            schedule.step()
            sampler.advance()
    return weight_sum(model)


def report(results: Results, seconds: float) -> list[str]:
    """Return the results as Markdown."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(results.kinds.items()))
    worlds = ", ".join(f"{world}: {count}" for world, count in sorted(results.worlds.items()))
    counts = {
        "samples lost or repeated, steps missing, weights that differ": (
            "epoch",
            "steps",
            "weights sum",
        ),
        "torn checkpoints accepted": ("loaded other weights",),
        "runs that could not resume": ("failed", "hangs", "does not complete"),
    }
    rows = [
        (fault, sum(any(sign in each for sign in signs) for each in results.faults))
        for fault, signs in counts.items()
    ]
    return [
        f"{results.kills} kills ({kinds}) of {results.starts} starts in {results.runs} runs, {results.resumed} of them",
        f"from a checkpoint; starts by ranks: {worlds}; {seconds:.0f} s.",
        "",
        *markdown_table(("fault", "count"), rows),
    ]


if __name__ == "__main__":
    BENCHMARK.main(measure)
