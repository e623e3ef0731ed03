"""Training runs that are killed again and again, at other numbers of ranks each time, and must lose nothing.

    python benchmarks/kills.py --kills 300 --write benchmarks/results/kills.md

Every run trains a small model, replicated (DDP) or sharded (FSDP2), on 1 to 4 real ranks with Gloo, and saves every
second step to a folder or to an S3 server on loopback. A start of a run is killed by SIGKILL: one rank or all, at a
random moment, or just before or after a random operation of saving and of deleting old checkpoints. The next start has
another number of ranks. When a run has come to its end, its log must show every sample of every epoch exactly once, and
its weights must be those of a run that nobody has killed. Each start compares the weights that it has loaded with what
was noted when they were saved. Any fault is printed and makes the exit code 1.
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
MOST_RANKS = 4
LONGEST_START_SECONDS = 120.0
TOLERANCE = 1e-4
WHOLE_HOST, BY_THE_CLOCK = 0.3, 0.5
"""Shares of the kills that hit all ranks, and that come after a time."""


@dataclass(frozen=True)
class Case:
    """One run: how its model is held, and where its checkpoints go."""

    name: str
    strategy: str
    root: Path
    uri: str


@dataclass(frozen=True)
class Death:
    """How a start ends: `seconds` after its beginning, or at the n-th operation of saving on one rank."""

    rank: int | None
    seconds: float | None = None
    operation: int | None = None

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        when = f"after {self.seconds:.2f} s" if self.seconds is not None else f"at operation {self.operation}"
        return f"{who} {when}"


@dataclass
class Told:
    """What has come out of all runs."""

    runs: int = 0
    starts: int = 0
    kills: int = 0
    faults: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    worlds: Counter[int] = field(default_factory=Counter)


def main() -> int:
    """Kill, compare, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["folder", "s3", "both"], default="both")
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "both"], default="both")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)  # noqa: S311 (a campaign that can be repeated)
    began = time.monotonic()
    told = Told()
    stores = ["folder", "s3"] if arguments.store == "both" else [arguments.store]
    strategies = ["ddp", "fsdp"] if arguments.strategy == "both" else [arguments.strategy]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, place_of(stores) as s3_uri:
        number = 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while told.kills < arguments.kills:
            store, strategy = stores[number % len(stores)], strategies[number // len(stores) % len(strategies)]
            root = Path(folder) / f"run-{number}"
            uri = f"{s3_uri}/run-{number}" if store == "s3" else (root / "checkpoints").as_uri()
            case = Case(f"run {number} ({strategy}, {store})", strategy, root, uri)
            try:
                carry_through(case, rng, told, arguments.kills)
            except KeyboardInterrupt:
                break  # what has been seen so far is told
            print(f"{case.name}: {told.kills} kills so far, {len(told.faults)} faults", file=sys.stderr, flush=True)
            shutil.rmtree(root)
            number += 1
    report(told, time.monotonic() - began, arguments.write)
    return 1 if told.faults else 0


def place_of(stores: list[str]) -> contextlib.AbstractContextManager[str]:
    """Serve S3 on loopback if it is needed; the block gets the uri of a bucket."""
    return serve_bucket("kills") if "s3" in stores else contextlib.nullcontext("")


def carry_through(case: Case, rng: random.Random, told: Told, enough: int) -> None:
    """Start a run until it has come to its end, killing it on the way; then compare what it has done."""
    world = rng.randint(1, MOST_RANKS)
    number = 0
    quiet = 0
    while True:
        death = choose_death(rng, world) if told.kills < enough else None
        has_ended = start(case, number, world, death, told)
        number += 1
        if has_ended:
            break
        quiet = quiet + 1 if death is None else 0
        if quiet > 1 or any(fault.startswith(case.name) for fault in told.faults):
            told.faults.append(f"{case.name}: does not come to its end")
            return
        world = rng.randint(1, MOST_RANKS)
    told.runs += 1
    told.faults += [f"{case.name}: {fault}" for fault in compare(case, number)]


def choose_death(rng: random.Random, world: int) -> Death:
    """Choose how a start ends."""
    rank = None if rng.random() < WHOLE_HOST else rng.randrange(world)
    if rng.random() < BY_THE_CLOCK:
        return Death(rank, seconds=rng.random() * 2.5)
    return Death(rank or 0, operation=rng.randint(1, 60))


# ---------------------------------------------------------------- one start


def start(case: Case, number: int, world: int, death: Death | None, told: Told) -> bool:
    """Run the ranks; return whether they came to the end of training."""
    port = free_port()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(case, number, rank, world, port, death)) for rank in range(world)]
    told.starts += 1
    told.worlds[world] += 1
    began = time.monotonic()
    for rank in ranks:
        rank.start()
    if death is not None and death.seconds is not None:
        while time.monotonic() - began < death.seconds and any(rank.is_alive() for rank in ranks):
            time.sleep(0.005)
        for rank in ranks if death.rank is None else [ranks[death.rank]]:
            rank.kill()
    while all(rank.is_alive() for rank in ranks) or (
        any(rank.is_alive() for rank in ranks) and all(rank.exitcode in (None, 0) for rank in ranks)
    ):
        time.sleep(0.005)
        if time.monotonic() - began > LONGEST_START_SECONDS:
            stacks = where_they_stand(case, number, ranks)
            told.faults.append(f"{case.name}: start {number} with {world} ranks hangs ({death}):\n{stacks}")
            break
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if -signal.SIGKILL in codes:
        told.kills += 1
        told.kinds["by the clock" if death is not None and death.seconds is not None else "at an operation"] += 1
    elif any(codes):
        text = (case.root / f"start-{number}-output.txt").read_text(errors="replace")[-1500:]
        told.faults.append(f"{case.name}: start {number} with {world} ranks failed ({codes}, {death}):\n{text}")
    told.resumed += resumed_step(case, number) > 0
    return codes == [0] * world


def where_they_stand(case: Case, number: int, ranks: list[Any]) -> str:
    """Return the stacks of ranks that hang."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(2.0)
    return (case.root / f"start-{number}-output.txt").read_text(errors="replace")[-12000:]


def resumed_step(case: Case, number: int) -> int:
    """Return the step that a start has resumed from; 0 for a new one or one that died before."""
    path = case.root / f"start-{number}-rank-0.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return int(json.loads(lines[0])["resumed"]) if lines and lines[0].endswith("}") else 0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def rank_main(case: Case, number: int, rank: int, world: int, port: int, death: Death | None) -> None:
    """Be one rank of one start."""
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
        if death is not None and death.operation is not None and death.rank == rank:
            die_at(death.operation)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        train(case, number, rank, world)
        code = 0
    except BaseException:  # noqa: BLE001 (told by the exit code)
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def die_at(operation: int) -> None:
    """Have this process killed just before (odd) or after (even) an operation of saving or deleting."""
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
    """Random vectors that tell which they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(LENGTH, 16, generator=generator)
        self.targets = self.inputs[:, :1].sin() + self.inputs[:, 1:2]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.targets[index], index


def train(case: Case, number: int, rank: int, world: int) -> None:
    """Train as a user's script does, and note each step's samples."""
    from cloudtrain_runtime import GlobalOrderSampler, checkpoint

    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = replicate_or_shard(plain, case.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
    # The first start that saves decides on the global batch; later ones keep it, whatever their number of ranks.
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
    """Wrap the model."""
    if strategy == "ddp":
        return DistributedDataParallel(model)
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


@torch.no_grad()
def weight_sum(model: nn.Module) -> float:
    """Return a number that tells one state of all weights from another."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        total += local.double().abs().sum()
    if any(hasattr(parameter, "_local_tensor") for parameter in model.parameters()):
        dist.all_reduce(total)
    return float(total)


# ---------------------------------------------------------------- what has become of a run


def compare(case: Case, starts: int) -> list[str]:
    """Return what is wrong with a run that came to its end."""
    faults = []
    lineage: dict[int, tuple[int, list[int]]] = {}
    weights: float | None = None
    global_batch = 1
    for number in range(starts):
        logs = [read_log(path) for path in sorted(case.root.glob(f"start-{number}-rank-*.jsonl"))]
        told = [entry for log in logs for entry in log]
        faults += [f"start {number} loaded other weights than were saved: {e['torn']}" for e in told if "torn" in e]
        if {e["resumed"] for e in told if "resumed" in e} == {0}:
            lineage = {}  # begun anew: the starts before have died before their first checkpoint
        global_batch = next((e["global"] for e in told if "global" in e), global_batch)
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
    if weights is None or abs(weights - expected) > TOLERANCE * abs(expected):
        faults.append(f"its weights sum up to {weights}, those of a run that nobody killed to {expected}")
    return faults


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log; the last one may have been cut by a kill."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def unkilled_weights(global_batch: int, known: dict[int, float] = {}) -> float:  # noqa: B006 (kept on purpose)
    """Return the weights of a run on one rank that nobody killed."""
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


def report(told: Told, seconds: float, path: Path | None) -> None:
    """Print what was seen, and write it down."""
    torn = sum("loaded other weights" in fault for fault in told.faults)
    beaten = sum("epoch" in fault or "steps" in fault or "weights sum" in fault for fault in told.faults)
    stuck = sum("failed" in fault or "hangs" in fault or "does not come" in fault for fault in told.faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(told.kinds.items()))
    worlds = ", ".join(f"{world}: {count}" for world, count in sorted(told.worlds.items()))
    lines = [
        f"{told.kills} kills ({kinds}) of {told.starts} starts in {told.runs} runs, {told.resumed} of them from a",
        f"checkpoint; starts by ranks: {worlds}; {seconds:.0f} s.",
        "",
        "| what | seen |",
        "|---|---|",
        f"| samples lost or repeated, steps missing, weights that differ | {beaten} |",
        f"| torn checkpoints accepted | {torn} |",
        f"| runs that could not resume | {stuck} |",
    ]
    print("\n".join([*lines, *told.faults]))
    if path is not None:
        path.write_text("# Runs killed again and again\n\n" + "\n".join([*lines, *told.faults]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
