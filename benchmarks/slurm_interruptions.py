"""Interrupt trainings on a real Slurm cluster at random moments, and check that they lose nothing.

    .venv/bin/python benchmarks/slurm_interruptions.py --interruptions 50 --write benchmarks/results/slurm_interruptions.md

Every run trains examples/digits on two nodes of the Slurm of the tests (`make slurm`, as root). Interruptions of a
random kind come at random moments: while the job waits after an earlier one, while an attempt starts, trains or saves, and
while another interruption is in progress. At the end of a run, its steps must have used the samples of an
uninterrupted run, its weights must be the same bit by bit, Slurm must know one job of it, no attempt that was replaced may
have saved a checkpoint, and no process may be left. Any fault is printed, and the exit code is then 1.
"""

from __future__ import annotations

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

from measure import BIN, Benchmark, Session, markdown_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import slurm_chains, slurm_interruptions
from support.jobs import Finished
from support.slurm_cluster import Cluster, cluster, missing
from support.slurm_interruptions import PREEMPTION, TIME_LIMIT, Interrupter, RunEndedError
from support.slurm_runs import Trainings

EPOCHS = 60
PER_RUN = 5
SITES = ("main", "spare", "spare-now", "short")
"""Sites, one for each partition: without preemption, preempted with 20 s of grace, and at once, and with a time limit."""
LIMIT_MINUTES = 2
"""Slurm's signal comes after half of it, in which a busy machine can start and take steps."""

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="an uninterrupted run on two nodes",
    goal="no sample lost or repeated, the same weights, one job for each run, and no checkpoint of an attempt that was replaced",
    mechanism="interruptions ended attempts of runs, which later attempts continued",
    rounds=0,
    options={
        "interruptions": (50, "interruptions of all runs together"),
        "seed": (0, "of all randomness"),
        "sites": (SITES, "partitions of the runs, in turn"),
        "folder": (
            "",
            "folder for the cluster and its runs, which are kept there; a temporary one without",
        ),
    },
    packages=("torch",),
)


@dataclass
class Results:
    """Results of all runs."""

    interruptions: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    steps: int = 0
    repeated_steps: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of interruptions."""
        return self.interruptions.total()


@dataclass(frozen=True)
class Expected:
    """An uninterrupted run."""

    chain: slurm_chains.Chain
    weights: str


def measure(session: Session) -> list[str]:
    """Run the campaign; return its results, and record the faults."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this benchmark needs a Slurm cluster on this machine: {reason}")
    options = session.options
    results = Results()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slurm-interruptions-") as made:
        folder = Path(options.folder or made).absolute()
        with cluster(folder, gpus=0, short_minutes=LIMIT_MINUTES, min_job_age=100_000) as slurm:
            trainings = prepare(slurm, folder)
            expected = run_uninterrupted(session, trainings)
            number = 0
            while results.count < options.interruptions:
                site = options.sites[number % len(options.sites)]
                count = min(PER_RUN, options.interruptions - results.count)
                rng = random.Random(f"{options.seed}/{number}")  # noqa: S311 (a campaign that can be repeated)
                faults = list(complete_run(trainings, site, rng, count, expected, results))
                results.faults += faults
                number += 1
                print(
                    f"run {number}: {results.count} interruptions, {len(results.faults)} faults so far",
                    file=sys.stderr,
                )
    session.faults += results.faults
    runs = results.sites.total()
    session.require(results.attempts > runs, "no run had a second attempt")
    return report(results, time.monotonic() - began, options.seed)


def prepare(slurm: Cluster, folder: Path) -> Trainings:
    """Describe the cluster's partitions as sites; return its trainings."""
    settings = folder / "config" / "cloudtrain" / "config.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    site = slurm.folder / "cloudtrain"
    tables = [f'[slurm.{name}]\nfolder = "{site}"\npartition = "{name}"\n' for name in SITES]
    settings.write_text("\n".join(tables) + f'time = "{LIMIT_MINUTES}m"\n')
    environ = {
        **{name: text for name, text in os.environ.items() if not name.startswith("CLOUDTRAIN_")},
        "SLURM_CONF": slurm.environ["SLURM_CONF"],
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

    return Trainings(cli, slurm, site)


def submit(trainings: Trainings, site: str) -> str:
    """Submit a training; return its run id."""
    options = ("--site", site, "--set", f"train.epochs={EPOCHS}", *slurm_chains.RECORDS_SAMPLES)
    return trainings.submit(*options)


def run_uninterrupted(session: Session, trainings: Trainings) -> Expected:
    """Run a training to its end, and check that each epoch has used each sample once."""
    run = submit(trainings, "main")
    status = trainings.wait_for_end(run)
    session.require(status["state"] == "SUCCEEDED", f"an uninterrupted run: {status}")
    chain = slurm_chains.read_chain(trainings.folder(run))
    session.require(chain.attempts == 1, "the run that is compared with was interrupted")
    epochs = slurm_chains.epochs_of(chain.samples, len(chain.samples) // EPOCHS)
    session.require(len(epochs) == EPOCHS, f"{len(epochs)} epochs were recorded")
    session.require(all(each == epochs[0] for each in epochs), "epochs use other samples")
    return Expected(chain, trainings.weights(run))


def complete_run(
    trainings: Trainings,
    site: str,
    rng: random.Random,
    count: int,
    expected: Expected,
    results: Results,
) -> Iterator[str]:
    """Interrupt a run until it ends; yield its faults."""
    run = submit(trainings, site)
    kinds = slurm_interruptions.KINDS
    if site.startswith("spare"):
        kinds = (*kinds, PREEMPTION, PREEMPTION)
    interrupter = Interrupter(trainings, run, rng, kinds)
    name = f"run {results.sites.total()} ({site}, {run})"
    try:
        for _ in range(count):
            print(f"{name}: {interrupter.interrupt()}", file=sys.stderr, flush=True)
    except RunEndedError:
        pass
    interrupter.wait_for_end()
    found = list(compare(trainings, run, expected, results))
    yield from (f"{name}, {', '.join(map(str, interrupter.done))}: {fault}" for fault in found)
    with_grace = {"spare": "preemption, 20 s of grace", "spare-now": "preemption at once"}
    for each in interrupter.done:
        kind = with_grace.get(site, each.kind) if each.kind == PREEMPTION else each.kind
        results.interruptions[kind] += 1
        results.moments[each.moment] += 1
    results.interruptions[TIME_LIMIT] += len(interrupter.limits_reached)
    results.sites[site] += 1
    trainings.slurm.restore()


def compare(trainings: Trainings, run: str, expected: Expected, results: Results) -> Iterator[str]:
    """Yield the faults of a run that has ended."""
    status = trainings.status(run)
    chain = slurm_chains.read_chain(trainings.folder(run))
    results.attempts += chain.attempts
    results.steps += len(chain.samples)
    results.repeated_steps += chain.repeated_steps
    if status["state"] != "SUCCEEDED":
        yield f"it is {status['state']} ({status['reason']})"
        return
    yield from slurm_chains.differences(chain, expected.chain)
    if trainings.weights(run) != expected.weights:
        yield "its weights differ from those of an uninterrupted run"
    if (jobs := slurm_interruptions.jobs_of(trainings.slurm, run)) != 1:
        yield f"Slurm knows {jobs} jobs of it"
    if not slurm_interruptions.processes_end(trainings, run):
        yield "processes of it live on"


def report(results: Results, seconds: float, seed: int) -> list[str]:
    """Return the results as Markdown."""
    return [
        f"{results.count} interruptions (seed {seed}) of {results.sites.total()} runs with {results.attempts} attempts,",
        f"{results.steps:,} steps; {seconds:.0f} s.",
        "",
        *markdown_table(("kind", "count"), sorted(results.interruptions.items())),
        "",
        *markdown_table(("moment", "count"), sorted(results.moments.items())),
        "",
        *markdown_table(("fault", "count"), count_faults(results)),
        "",
        f"Attempts that had no time to save were repeated from the last checkpoint: {results.repeated_steps:,} steps in all. What",
        "they had done is in no result.",
    ]


def count_faults(results: Results) -> list[tuple[str, int]]:
    """Return the number of faults by their kind."""
    signs = {
        "samples lost or repeated, steps missing": ("steps",),
        "losses that differ or are not reported": ("losses",),
        "weights that differ": ("weights differ",),
        "runs with more than one job": ("Slurm knows",),
        "checkpoints of an attempt that was replaced": ("after it was replaced",),
        "runs that did not continue": ("it is ",),
        "processes left": ("live on",),
    }
    return [
        (
            kind,
            sum(
                any(sign in each.rpartition("): ")[2] for sign in all_signs)
                for each in results.faults
            ),
        )
        for kind, all_signs in signs.items()
    ]


if __name__ == "__main__":
    BENCHMARK.main(measure)
