"""Kill training runs repeatedly, resume them with other numbers of ranks, and check that they lose nothing.

    python benchmarks/kills.py --kills 300 --write benchmarks/results/kills.md

Every run trains a small model, replicated (DDP) or sharded (FSDP2), on 1 to 4 real ranks with Gloo, and saves every
second step to a folder or to an S3 server on loopback. SIGKILL ends a start of a run: one rank or all, at a random
moment, or just before or after a random operation of saving and of deleting old checkpoints. The next start has another
number of ranks. At the end of a run, its log must show every sample of every epoch exactly once, and its weights must
equal those of an uninterrupted run. Each start compares the loaded weights with a checksum from when they were saved.
Any fault is printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loopback import serve_bucket
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

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
        when = f"after {self.seconds:.2f} s" if self.seconds is not None else f"at operation {self.operation}"
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


def main() -> int:
    """Run the campaign and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["folder", "s3", "both"], default="both")
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "both"], default="both")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)  # noqa: S311 (a campaign that can be repeated)
    started = time.monotonic()
    results = Results()
    stores = ["folder", "s3"] if arguments.store == "both" else [arguments.store]
    strategies = ["ddp", "fsdp"] if arguments.strategy == "both" else [arguments.strategy]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, open_store(stores) as s3_uri:
        number = 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while results.kills < arguments.kills:
            store, strategy = stores[number % len(stores)], strategies[number // len(stores) % len(strategies)]
            root = Path(folder) / f"run-{number}"
            uri = f"{s3_uri}/run-{number}" if store == "s3" else (root / "checkpoints").as_uri()
            case = Case(f"run {number} ({strategy}, {store})", strategy, root, uri)
            try:
                complete_run(case, rng, results, arguments.kills)
            except KeyboardInterrupt:
                break  # report the results so far
            print(
                f"{case.name}: {results.kills} kills so far, {len(results.faults)} faults", file=sys.stderr, flush=True
            )
            shutil.rmtree(root)
            number += 1
    report(results, time.monotonic() - started, arguments.write)
    return 1 if results.faults else 0


def open_store(stores: list[str]) -> contextlib.AbstractContextManager[str]:
    """Serve S3 on loopback if needed; the context value is the URI of a bucket."""
    return serve_bucket("kills") if "s3" in stores else contextlib.nullcontext("")


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
    ranks = [fork.Process(target=rank_main, args=(case, number, rank, world, port, kill)) for rank in range(world)]
    results.starts += 1
    results.worlds[world] += 1
    started = time.monotonic()
    for rank in ranks:
        rank.start()
    if kill is not None and kill.seconds is not None:
        while time.monotonic() - started < kill.seconds and any(rank.is_alive() for rank in ranks):
            time.sleep(0.005)
        for rank in ranks if kill.rank is None else [ranks[kill.rank]]:
            rank.kill()
    while all(rank.is_alive() for rank in ranks) or (
        any(rank.is_alive() for rank in ranks) and all(rank.exitcode in (None, 0) for rank in ranks)
    ):
        time.sleep(0.005)
        if time.monotonic() - started > START_TIMEOUT_SECONDS:
            stacks = stacks_of(case, number, ranks)
            results.faults.append(f"{case.name}: start {number} with {world} ranks hangs ({kill}):\n{stacks}")
            break
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if -signal.SIGKILL in codes:
        results.kills += 1
        results.kinds["after a time" if kill is not None and kill.seconds is not None else "at an operation"] += 1
    elif any(codes):
        text = (case.root / f"start-{number}-output.txt").read_text(errors="replace")[-1500:]
        results.faults.append(f"{case.name}: start {number} with {world} ranks failed ({codes}, {kill}):\n{text}")
    results.resumed += resumed_step(case, number) > 0
    return codes == [0] * world


def stacks_of(case: Case, number: int, ranks: list[Any]) -> str:
    """Return the stacks of ranks that hang."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(2.0)
    return (case.root / f"start-{number}-output.txt").read_text(errors="replace")[-12000:]


def resumed_step(case: Case, number: int) -> int:
    """Return the step that a start resumed from; 0 for a fresh start or one that was killed earlier."""
    path = case.root / f"start-{number}-rank-0.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return int(json.loads(lines[0])["resumed"]) if lines and lines[0].endswith("}") else 0


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CLOUDTRAIN_ML_ROOT=str(tree.root),
    )
    output = os.open(case.root / f"start-{number}-output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
        import traceback

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

    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = replicate_or_shard(plain, case.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
    # The first start that saves sets the global batch; later ones keep it for any number of ranks.
    sampler = GlobalOrderSampler(LENGTH, batch_size=BATCH, seed=7)
    start = checkpoint.load(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler)
    with (case.root / f"start-{number}-rank-{rank}.jsonl").open("w", buffering=1) as log:
        print(json.dumps({"resumed": start.step, "global": sampler.global_size}), file=log)
        if start.step and abs(start.state["weights"] - weight_sum(model)) > 1e-6 * abs(start.state["weights"]):
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
    checkpoint.save(sampler.step, model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, force=True)


def replicate_or_shard(model: nn.Module, strategy: str) -> nn.Module:
    """Return the model with DDP or FSDP2."""
    if strategy == "ddp":
        return DistributedDataParallel(model)
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


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
            f"start {number} loaded other weights than were saved: {e['torn']}" for e in entries_of_start if "torn" in e
        ]
        if {e["resumed"] for e in entries_of_start if "resumed" in e} == {0}:
            lineage = {}  # fresh start: earlier ones were killed before their first checkpoint
        global_batch = next((e["global"] for e in entries_of_start if "global" in e), global_batch)
        steps = set.intersection(*({e["step"] for e in log if "step" in e} for log in logs)) if logs else set()
        for step in steps:
            entries = [e for log in logs for e in log if e.get("step") == step]
            lineage[step] = (entries[0]["epoch"], [index for e in entries for index in e["samples"]])
        weights = next((e["weights"] for log in logs for e in log if "ended" in e), weights)
    for epoch in range(EPOCHS):
        seen = Counter(index for at, samples in lineage.values() if at == epoch for index in samples)
        lost, repeated = set(range(LENGTH)) - set(seen), [index for index, times in seen.items() if times > 1]
        if lost or repeated:
            faults.append(f"epoch {epoch}: {len(lost)} samples lost, {len(repeated)} repeated")
    steps = -(-LENGTH // global_batch) * EPOCHS
    if sorted(lineage) != list(range(1, steps + 1)):
        faults.append(f"steps {sorted(set(range(1, steps + 1)) ^ set(lineage))} are missing or too many")
    expected = unkilled_weights(global_batch)
    if weights is None or abs(weights - expected) > RELATIVE_TOLERANCE * abs(expected):
        faults.append(f"its weights sum up to {weights}, those of an uninterrupted run to {expected}")
    return faults


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; a kill may have truncated the last one."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def unkilled_weights(global_batch: int, known: dict[int, float] = {}) -> float:  # noqa: B006 (a cache)
    """Return the checksum of an uninterrupted run on one rank."""
    if global_batch not in known:
        from cloudtrain_runtime import GlobalOrderSampler

        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
        sampler = GlobalOrderSampler(LENGTH, batch_size=global_batch, seed=7, rank=0, world_size=1)
        data = Samples()
        while sampler.epoch < EPOCHS:
            for indices in list(sampler):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(data.inputs[indices]), data.targets[indices]).backward()
                optimizer.step()
                schedule.step()
                sampler.advance()
        known[global_batch] = weight_sum(model)
    return known[global_batch]


def report(results: Results, seconds: float, path: Path | None) -> None:
    """Print the results and write them to a file."""
    torn = sum("loaded other weights" in fault for fault in results.faults)
    wrong = sum("epoch" in fault or "steps" in fault or "weights sum" in fault for fault in results.faults)
    stuck = sum("failed" in fault or "hangs" in fault or "does not complete" in fault for fault in results.faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(results.kinds.items()))
    worlds = ", ".join(f"{world}: {count}" for world, count in sorted(results.worlds.items()))
    lines = [
        f"{results.kills} kills ({kinds}) of {results.starts} starts in {results.runs} runs, {results.resumed} of them",
        f"from a checkpoint; starts by ranks: {worlds}; {seconds:.0f} s.",
        "",
        "| fault | count |",
        "|---|---|",
        f"| samples lost or repeated, steps missing, weights that differ | {wrong} |",
        f"| torn checkpoints accepted | {torn} |",
        f"| runs that could not resume | {stuck} |",
    ]
    print("\n".join([*lines, *results.faults]))
    if path is not None:
        path.write_text("# Repeatedly killed runs\n\n" + "\n".join([*lines, *results.faults]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
