"""Kill the processes of a local chain at random moments, and check that it loses nothing.

    .venv/bin/python benchmarks/chains.py --kills 30 --write benchmarks/results/chains.md

One training on two hosts of this machine is submitted with `--recover`. SIGKILL ends all its ranks, one of them, a host,
the supervisor or the controller, at a random moment: while an attempt starts, trains, saves or ends, and while no
controller lives. A controller that was killed is started again by `cloudtrain recover`, after a random time. At the end,
the steps must have used the samples of an uninterrupted run, the weights must be the same bit by bit, every attempt but
the last must have ended for an outside cause, no two attempts may have trained at the same time, and no process may be
left. Any fault is printed, and the exit code is then 1.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measure import BIN, Benchmark, Session, markdown_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import chains, slurm_chains
from support.jobs import Finished, processes_of, until

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.features.recovery.stored_chain import StoredChain

STEPS = 8000
EVERY_STEPS = 20
PACE_SECONDS = 0.02
"""Pause of each step until the last kill, so that the training outlasts all of them."""
LONGEST_SECONDS = 5.0
"""Longest time from one kill to the next, apart from a wait for a checkpoint."""
ALL_RANKS = "all ranks"
ONE_RANK = "one rank"
HOST = "a host"
SUPERVISOR = "the supervisor"
CONTROLLER = "the controller"
KINDS = (ALL_RANKS, ONE_RANK, HOST, SUPERVISOR, CONTROLLER)

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="an uninterrupted run",
    goal="no sample lost or repeated, the same weights, and one attempt at a time",
    mechanism="SIGKILL ended attempts and controllers of a chain, which later ones continued",
    rounds=0,
    options={"kills": (30, "kills of all kinds together"), "seed": (0, "of all randomness")},
    packages=("torch",),
)


@dataclass
class Killer:
    """Kills processes of one chain.

    Attributes:
        trainings: The chains.
        stored: The chain.
        rng: All randomness.
        kills: Number of kills by kind.
        faults: What must not happen.
    """

    trainings: chains.Chains
    stored: StoredChain
    rng: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def kill(self) -> None:
        """Kill what exists of a random kind after a random time."""
        self._save_before_the_last_try()
        deadline = time.monotonic() + self.rng.uniform(0, LONGEST_SECONDS)
        kind = self.rng.choice(KINDS)
        while time.monotonic() < deadline or not self._kill_one(kind):
            time.sleep(0.01)
            if time.monotonic() > deadline + LONGEST_SECONDS:
                kind = self.rng.choice(KINDS)
                deadline = time.monotonic()
                self.recover()
        self.kills[kind] += 1
        training = [each.run for each in self.stored.read().attempts if chains.ranks_of(each.run)]
        if len(training) > 1:
            self.faults.append(f"attempts at the same time: {training}")
        print(f"{self.kills.total()}: {kind}, attempt {self.attempts}", file=sys.stderr, flush=True)
        if self.rng.choice((True, False)):
            # Otherwise the next kill comes while no controller lives.
            self.recover()

    def recover(self) -> None:
        """Start the controller again; one that lives stays."""
        done = self.trainings.cli("recover", self.stored.id)
        if done.code != 0:
            raise AssertionError(done.err)

    @property
    def attempts(self) -> int:
        """Number of attempts."""
        return len(self.stored.read().attempts)

    def _kill_one(self, kind: str) -> bool:
        """Kill one process of a kind, or all ranks; return whether there was one."""
        run = self.stored.read().newest.run
        found = list(self._find(kind, run))
        if kind != ALL_RANKS and found:
            found = [self.rng.choice(found)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                chains.kill(process)
        return bool(found)

    def _find(self, kind: str, run: str) -> list[psutil.Process]:
        if kind in (ALL_RANKS, ONE_RANK):
            return chains.ranks_of(run)
        if kind == CONTROLLER:
            return chains.controllers_of(self.stored.id)
        supervisors = chains.supervisors_of(run)
        if kind == SUPERVISOR:
            return supervisors
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for each in supervisors for child in each.children()]
        return []

    def _save_before_the_last_try(self) -> None:
        """After two attempts without a new checkpoint, wait for one: a third ends the chain, as it should."""
        if self._lacks_checkpoints():
            self.recover()
            until(lambda: not self._lacks_checkpoints())

    def _lacks_checkpoints(self) -> bool:
        """Return whether the last two attempts, the active one among them, have saved nothing new so far."""
        attempts = self.stored.read().attempts
        known = -1
        has_saved = []
        for each in attempts:
            step = self._newest_step(each.run) if each.is_active else each.checkpoint
            has_saved.append(step is not None and step > known)
            known = max(known, -1 if step is None else step)
        return len(attempts) > 1 and not any(has_saved[-2:])

    def _newest_step(self, run: str) -> int | None:
        """Return the step of a run's newest checkpoint; None without one."""
        found = (self.stored.home / "runs" / run / "checkpoints").glob("step-*/manifest.json")
        return max((int(each.parent.name.split("-")[1]) for each in found), default=None)


def measure(session: Session) -> list[str]:
    """Run the campaign; return its results, and record the faults."""
    options = session.options
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chains-") as made:
        folder = Path(made)
        expected = train_uninterrupted(folder / "expected")
        trainings = make_chains(folder / "chain")
        run = submit(trainings, "--recover", "--set", "limits.recover.attempts=100")
        stored = chains.stored_chain(run, folder / "chain" / "home")
        killer = Killer(trainings, stored, random.Random(options.seed))  # noqa: S311 (can be repeated)
        while killer.kills.total() < options.kills:
            killer.kill()
        killer.recover()
        trainings.release_all()
        status = trainings.end_of(run)
        found = read_chain(stored)
        session.require(status["state"] == "SUCCEEDED", f"the chain is {status}")
        session.require(found.attempts > 1, "no attempt was repeated")
        session.faults += killer.faults
        session.faults += compare(stored, found, expected)
        weights = chains.weights_in(Path(status["artifacts"]["model_folder"]))
        if weights != expected[1]:
            session.faults.append("the weights differ from those of an uninterrupted run")
        seconds = time.monotonic() - began
        return report(killer, found, session.faults, seconds=seconds, seed=options.seed)


def make_chains(folder: Path) -> chains.Chains:
    """Return the chains in a folder, with a home and a configuration of their own."""
    folder.mkdir(parents=True)
    environ = {
        **{name: text for name, text in os.environ.items() if not name.startswith("CLOUDTRAIN_")},
        "CLOUDTRAIN_HOME": str(folder / "home"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }

    def cli(*arguments: str | Path) -> Finished:
        done = subprocess.run(
            [BIN / "cloudtrain", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            cwd=folder,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return chains.Chains(cli, folder)


def submit(trainings: chains.Chains, *options: str) -> str:
    """Submit the training; return its run id."""
    changes = ("--set", f"train.steps={STEPS}", "--set", f"checkpoint.every={EVERY_STEPS} steps")
    return trainings.submit(
        "--instances", "2", *changes, *slurm_chains.RECORDS_SAMPLES, *options, pace=PACE_SECONDS
    )


def train_uninterrupted(folder: Path) -> tuple[slurm_chains.Chain, str]:
    """Run the training to its end; return what it has done, and its weights."""
    trainings = make_chains(folder)
    trainings.release_all()
    run = submit(trainings)
    status = trainings.end_of(run)
    root = folder / "home" / "runs" / run
    samples = slurm_chains.samples_of(JobFolder(root))
    if status["state"] != "SUCCEEDED" or len(samples) != STEPS:
        sys.exit(f"the uninterrupted run has trained {len(samples)} steps: {status}")
    weights = chains.weights_in(Path(status["artifacts"]["model_folder"]))
    return slurm_chains.Chain(1, samples, 0, {}, ()), weights


def read_chain(stored: StoredChain) -> slurm_chains.Chain:
    """Return what the attempts of a chain have done together."""
    runs = [each.run for each in stored.read().attempts]
    samples: dict[int, tuple[str, ...]] = {}
    repeated = 0
    for run in runs:
        found = slurm_chains.samples_of(JobFolder(stored.home / "runs" / run))
        # An attempt continues the steps before its own first one.
        later = [step for step in samples if found and step >= min(found)]
        repeated += len(later)
        for step in later:
            del samples[step]
        samples |= found
    return slurm_chains.Chain(len(runs), samples, repeated, {}, ())


def compare(
    stored: StoredChain, found: slurm_chains.Chain, expected: tuple[slurm_chains.Chain, str]
) -> Iterator[str]:
    """Yield the faults of a chain that has ended."""
    chain = stored.read()
    yield from slurm_chains.differences(found, expected[0])
    runs = [each.run for each in chain.attempts]
    folders = [each.name for each in (stored.home / "runs").iterdir()]
    if len(set(runs)) != len(runs) or not set(folders) <= set(runs):
        yield f"runs {sorted(folders)}, and attempts {runs}"
    for number, each in enumerate(chain.attempts[:-1], 1):
        if not each.cause:
            yield f"attempt {number} ended without an outside cause: {each.reason}"
    for run in runs:
        if processes_of(run):
            yield f"processes of {run} live on"


def report(
    killer: Killer,
    found: slurm_chains.Chain,
    faults: list[str],
    *,
    seconds: float,
    seed: int,
) -> list[str]:
    """Return the results as Markdown."""
    lost = [each for each in faults if "steps" in each]
    weights = "no" if any("weights" in each for each in faults) else "yes, bit by bit"
    rows = [
        ("kills", killer.kills.total()),
        *((f"of {kind}", count) for kind, count in sorted(killer.kills.items())),
        ("attempts", found.attempts),
        ("steps of the training", f"{len(found.samples):,}"),
        ("steps run", f"{len(found.samples) + found.repeated_steps:,}"),
        ("steps repeated", f"{found.repeated_steps:,}"),
        ("samples lost or used twice", len(lost)),
        ("weights equal", weights),
        ("other faults", len(faults) - len(lost)),
    ]
    return [*markdown_table(("", f"seed {seed}, {seconds:.0f} s"), rows)]


if __name__ == "__main__":
    BENCHMARK.main(measure)
