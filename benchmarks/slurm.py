"""Compare three ways to train on a Slurm cluster: cloudtrain, submitit, and a batch script written by hand.

    .venv/bin/python benchmarks/slurm.py --submitit PYTHON --write benchmarks/results/slurm.md

Each way trains the same DDP script on two nodes of the Slurm of the tests (`make slurm`, as root), and saves every 100
steps; its files are in benchmarks/slurm_ways. Both peers save all that an exact continuation needs: weights, optimizer,
position in the data, and the random states of all ranks. The batch script also saves when it gets SIGTERM. submitit does
what its documentation describes: its callable is Checkpointable, and the cluster is measured with and without the setting
that submitit needs to recognise a preemption (preempt_send_user_signal).

--submitit names the Python of an environment with submitit, torch and scikit-learn; without it, submitit is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import BIN, Benchmark, Peer, Session, alternate, markdown_table, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import until
from support.slurm_cluster import Cluster, cluster, missing

WAYS = Path(__file__).with_name("slurm_ways")
CLOUDTRAIN, SUBMITIT, SBATCH = "cloudtrain", "submitit", "batch script by hand"
FOLDERS = {CLOUDTRAIN: "with_cloudtrain", SUBMITIT: "with_submitit", SBATCH: "with_sbatch"}
COMMANDS = {
    CLOUDTRAIN: "cloudtrain submit job.yaml --backend slurm",
    SUBMITIT: "python submit.py",
    SBATCH: "sbatch job.sbatch",
}
SITE_LINES = ("[slurm.main]", 'folder = "/fsx/me/cloudtrain"')
"""What a user of cloudtrain writes once for a cluster."""
GRACE_SECONDS = 8
SPARE = {"spare": f"{GRACE_SECONDS} s of grace", "spare-now": "no grace"}
"""Partitions whose jobs are preempted."""
SIGNAL_SETTING = "SlurmctldParameters=preempt_send_user_signal"
SECONDS_TO_END = 400.0

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="submitit 1.5 in its documented way, and a batch script with srun and torchrun",
    goal="no step repeated after a preemption, the weights of an uninterrupted run, and fewer lines than either peer",
    mechanism="a step was recorded after the submit, and jobs were preempted while they trained",
    rounds=5,
    options={
        "submitit": ("", "Python of an environment with submitit and torch"),
        "preemptions": (3, "preemptions of each way in each case"),
        "seed": (0, "of the moments of preemption"),
    },
    packages=("torch",),
)


@dataclass
class Way:
    """One of the ways, on one cluster."""

    name: str
    slurm: Cluster
    folder: Path
    python: str
    job: str = ""
    run: Path = Path()
    count: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)

    def submit(self, partition: str) -> None:
        """Submit the job from a new folder, and remember its id."""
        self.count += 1
        self.run = self.folder / f"{FOLDERS[self.name]}-{self.count}"
        shutil.copytree(WAYS / FOLDERS[self.name], self.run)
        shutil.copy(WAYS / "net.py", self.run)
        variables = {
            "STEPS": str(self.run / "steps"),
            "PARTITION": partition,
            "OMP_NUM_THREADS": "1",
        }
        variables["PATH"] = f"{Path(self.python).parent}:{self.slurm.environ['PATH']}"
        variables["NODE_ADDRESSES"] = json.dumps(self._node_addresses())
        command = {
            CLOUDTRAIN: [
                str(BIN / "cloudtrain"), "submit", "job.yaml", "--backend", "slurm", "--site", partition, "--new",
                "--set", f"code.env.STEPS={variables['STEPS']}", "--set", "code.env.OMP_NUM_THREADS=1",
            ],
            SUBMITIT: [self.python, "submit.py"],
            SBATCH: ["sbatch", f"--partition={partition}", "job.sbatch"],
        }[self.name]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=self.run,
            env={**self.slurm.environ, **self.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"{self.name} cannot submit: {done.stdout}{done.stderr}")
        self.job = max(self.slurm.run("squeue", "--noheader", "--format=%A").split(), key=int)

    def _node_addresses(self) -> dict[str, str]:
        """Return the nodes' addresses. Their names do not resolve, as those of a real cluster do."""
        shown = {
            node: self.slurm.run("scontrol", "show", "node", node) for node in self.slurm.nodes
        }
        return {node: text.partition("NodeAddr=")[2].split()[0] for node, text in shown.items()}

    def steps(self) -> list[tuple[int, float]]:
        """Return the steps so far with their times."""
        file = self.run / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return [
            (int(step), float(at))
            for step, at in (line.split() for line in lines if line.count(" ") == 1)
        ]

    def wait_for_step(self, step: int) -> float:
        """Wait for a step; return when the first one was taken. Exit if the job ends before."""
        while len(found := self.steps()) < step:
            if not self.state():
                sys.exit(f"{self.name} has ended before step {step}:\n{self.output()}")
            time.sleep(0.1)
        return found[0][1]

    def state(self) -> str:
        """Return the state of the job in the queue; empty after its end."""
        return self.slurm.run(
            "squeue", "--noheader", f"--jobs={self.job}", "--format=%T %r"
        ).strip()

    def wait_for_end(self) -> None:
        """Wait until the job has ended. One that was queued again waits seconds instead of minutes."""

        def has_ended() -> bool:
            state = self.state()
            if state == "PENDING BeginTime":
                self.slurm.start_now(self.job)
            time.sleep(0.3)
            return not state

        until(has_ended, seconds=SECONDS_TO_END)

    def weights(self) -> str:
        """Return a digest of the trained weights; empty without any."""
        found = sorted(self._root().rglob("model.pt"))
        if not found:
            return ""
        saved = torch.load(found[0], weights_only=True)
        return hashlib.sha256(
            b"".join(saved[name].numpy().tobytes() for name in sorted(saved))
        ).hexdigest()

    def _root(self) -> Path:
        if self.name != CLOUDTRAIN:
            return self.run
        name = (
            self.slurm.run("scontrol", "show", "job", self.job, "--oneliner")
            .partition("JobName=")[2]
            .split()[0]
        )
        return self.slurm.folder / "cloudtrain" / "runs" / name / "model"

    def output(self) -> str:
        """Return the end of what the job has printed."""
        return "\n".join(
            file.read_text(errors="replace")[-2000:]
            for file in self.run.rglob("*.log") or self.run.rglob("*.err")
        )

    def preempt(self, step: int, partition: str) -> tuple[int, str, bool]:
        """Preempt a job after a step, and let it continue.

        Returns: Steps that were repeated, Slurm's state at the end, and whether the training was completed.
        """
        self.submit(partition)
        self.wait_for_step(step)
        nodes = len(self.slurm.nodes)
        self.slurm.submit("sleep 1", "--partition=main", "--exclusive", f"--nodes={nodes}")
        self.wait_for_end()
        numbers = [number for number, _ in self.steps()]
        return len(numbers) - len(set(numbers)), self.slurm.state(self.job), bool(self.weights())


def measure(session: Session) -> list[str]:
    """Measure lines, times and preemptions."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this benchmark needs a Slurm cluster on this machine: {reason}")
    pythons = {CLOUDTRAIN: sys.executable, SBATCH: sys.executable}
    if session.options.submitit:
        pythons[SUBMITIT] = session.options.submitit
    else:
        print(
            "submitit is left out: --submitit names a Python that has it (pip install submitit)",
            file=sys.stderr,
        )
    names = [each for each in FOLDERS if each in pythons]
    with tempfile.TemporaryDirectory(prefix="slurm-") as made, contextlib.ExitStack() as clusters:

        def prepare(name: str, number: int, *settings: str) -> Way:
            folder = Path(made) / f"{name.partition(' ')[0]}-{number}"
            options = {"grace_time": GRACE_SECONDS, "min_job_age": 100_000, "settings": settings}
            slurm = clusters.enter_context(cluster(folder, **options))
            return Way(
                name, slurm, slurm.folder, pythons[name], environ=write_settings(folder, slurm)
            )

        ways = [prepare(name, 1) for name in names]
        started = measure_start(session, ways)
        # Each in a cluster of its own, at the same time: steps are counted, no seconds.
        both = [*ways, *(prepare(name, 2, SIGNAL_SETTING) for name in names)]
        with ThreadPoolExecutor(len(both)) as threads:
            rows = list(threads.map(lambda way: measure_preemptions(session, way), both))
        plain = by_partition(rows[: len(names)])
        signalled = by_partition(rows[len(names) :])
    headings = (
        "way",
        "preemption",
        "continued",
        "steps repeated",
        "weights of an uninterrupted run",
    )
    return [
        *count_lines(names),
        "",
        *started,
        "",
        "Preemption on a cluster with Slurm's default settings:",
        "",
        *markdown_table(headings, plain),
        "",
        "The same with `preempt_send_user_signal`, which submitit's documentation asks an administrator for:",
        "",
        *markdown_table(headings, signalled),
        "",
    ]


def write_settings(folder: Path, slurm: Cluster) -> dict[str, str]:
    """Describe a cluster's partitions as sites of cloudtrain; return the variable that names the settings."""
    settings = folder / "config" / "cloudtrain" / "config.toml"
    settings.parent.mkdir(parents=True)
    shared = slurm.folder / "cloudtrain"
    tables = (
        f'[slurm.{each}]\nfolder = "{shared}"\npartition = "{each}"' for each in ("main", *SPARE)
    )
    settings.write_text("\n".join(tables))
    return {"XDG_CONFIG_HOME": str(folder / "config")}


def by_partition(rows: list[list[tuple[object, ...]]]) -> list[tuple[object, ...]]:
    """Return the rows of all ways, those of one partition after the other."""
    return [row for same in zip(*rows, strict=True) for row in same]


def count_lines(names: list[str]) -> list[str]:
    """Return a table of the lines that a user writes for each way."""
    rows = []
    for name in names:
        counts = {
            file.name: count_code(file) for file in sorted((WAYS / FOLDERS[name]).glob("*.*"))
        }
        if name == CLOUDTRAIN:
            counts["config.toml, once"] = len(SITE_LINES)
        parts = ", ".join(f"{file}: {count}" for file, count in counts.items())
        rows.append((name, f"`{COMMANDS[name]}`", sum(counts.values()), parts))
    return markdown_table(("way", "command", "lines", "of them"), rows)


def count_code(file: Path) -> int:
    """Return the number of lines that are neither empty nor comments."""
    lines = (line.strip() for line in file.read_text().splitlines() if "# of the test" not in line)
    return sum(
        bool(line) and (not line.startswith("#") or line.startswith("#SBATCH")) for line in lines
    )


def measure_start(session: Session, ways: list[Way]) -> list[str]:
    """Return a table of the time from the command to the first step."""

    def start(way: Way) -> float:
        began = time.time()
        way.submit("main")
        first = way.wait_for_step(1)
        session.require(first > began, f"{way.name} took its first step before the submit")
        way.slurm.cancel_all()
        return first - began

    peers = [Peer(way.name, lambda way=way: start(way)) for way in ways]
    found = alternate(peers, session.rounds)
    return table("command to first step", found, base=SBATCH)


def measure_preemptions(session: Session, way: Way) -> list[tuple[object, ...]]:
    """Return a row for each partition: what happens to a way at preemptions."""
    way.submit("main")
    way.wait_for_end()
    expected = way.weights()
    session.require(bool(expected), f"{way.name} trains nothing:\n{way.output()}")
    rng = random.Random(session.options.seed)  # noqa: S311 (moments that can be repeated)
    steps = [rng.randint(110, 190) for _ in range(session.options.preemptions)]
    return [
        (way.name, grace, *describe(session, way, partition, steps, expected))
        for partition, grace in SPARE.items()
    ]


def describe(
    session: Session, way: Way, partition: str, steps: list[int], expected: str
) -> tuple[str, str, str]:
    """Preempt a way after some steps; return whether it continues, the steps repeated, and whether the weights are equal."""
    repeated, completed, equal, states = [], 0, 0, []
    for step in steps:
        again, state, is_complete = way.preempt(step, partition)
        session.require(
            len(way.steps()) >= step, f"{way.name} was not training when it was preempted"
        )
        print(
            f"{way.name} {partition} at {step}: repeated {again}, {state}, complete: {is_complete}",
            file=sys.stderr,
            flush=True,
        )
        completed += is_complete
        equal += is_complete and way.weights() == expected
        repeated.append(again)
        states.append(state)
    count = len(steps)
    continued = f"{completed} of {count}"
    if completed < count:
        continued += f" (Slurm: {', '.join(sorted(set(states)))})"
    median = statistics.median(repeated)
    return continued, f"{median:g} ({min(repeated)} to {max(repeated)})", f"{equal} of {count}"


if __name__ == "__main__":
    BENCHMARK.main(measure)
