"""Measure sweeps on this machine: a controller that is killed, ASHA against random search, and overhead per trial.

    .venv/bin/python benchmarks/sweeps.py [--trials 20] [--ray PYTHON] [--write benchmarks/results/sweeps.md]

The first part runs trials of examples/digits, two at a time, and kills the controller twice; the job of the best trial
is then run again. The second part searches the learning rate of examples/gpt-stdlib at random and with ASHA: both
propose the same values. The third part starts trials of an empty script: cloudtrain starts each as a run with an
instance, a log and a record, the others as one process. Its floor is the processes alone, without a search.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import BIN, REPOSITORY, Benchmark, Session, clean_environ, markdown_table

NOISE = 0.05
"""Nats per byte by which two runs of equal settings differ on different numbers of threads, at most."""
MOST_SECONDS = 1.0
"""Seconds per trial of an empty script, two at a time, at most."""
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="random search for ASHA; plain Optuna and Ray Tune for the overhead per trial",
    goal=f"exactly as many trials as asked for; ASHA within {NOISE} nats of random search with half of its steps; "
    f"{MOST_SECONDS} s per trial of an empty script",
    mechanism="the controller was killed twice, and each trial had one run; ASHA trained fewer steps",
    rounds=0,
    options={
        "trials": (20, "trials of the first and the third part"),
        "gpt-trials": (9, "trials of the second part"),
        "ray": ("", "a Python with ray[tune]; without it, Ray Tune is left out"),
    },
    packages=("torch", "optuna"),
)

DIGITS = """\
name: digits-kills
job: JOB
space:
  train.learning_rate: {log_uniform: [3e-4, 3e-2]}
  code.args.channels: {choice: [4, 8]}
objective: validation/accuracy
trials: TRIALS
parallel: 2
seed: 1
"""
GPT = """\
name: gpt-STRATEGY
job: JOB
space:
  train.learning_rate: {log_uniform: [1e-4, 3e-2]}
objective: validation/loss
strategy: STRATEGY
trials: TRIALS
parallel: 2
seed: 1
"""
EMPTY = """\
name: empty
job:
  name: empty
  code: {command: [bash, -c, "python empty.py $$X"], env: {X: "0"}}
  cluster: {instance_type: ml.m5.large}
  metrics: {loss: "loss=([0-9.]+)"}
space: {code.env.X: {uniform: [0, 1]}}
objective: train/loss
strategy: random
trials: TRIALS
parallel: 2
"""
SCRIPT = "import sys; print(f'loss={float(sys.argv[1]):.6f}', flush=True)\n"
PLAIN_OPTUNA = """
import subprocess, sys
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    done = subprocess.run([sys.executable, "empty.py", str(x)], capture_output=True, text=True, check=True)
    return float(done.stdout.partition("=")[2])
study = optuna.create_study(storage="sqlite:///plain.db", sampler=optuna.samplers.RandomSampler(seed=0))
study.optimize(objective, n_trials=TRIALS, n_jobs=2)
assert len(study.trials) == TRIALS
"""
FLOOR = """
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
def run(x):
    subprocess.run([sys.executable, "empty.py", str(x)], capture_output=True, check=True)
with ThreadPoolExecutor(2) as pool:
    list(pool.map(run, range(TRIALS)))
"""
RAY_TUNE = """
import subprocess, sys
from ray import tune
def objective(config):
    program = [sys.executable, FOLDER + "/empty.py", str(config["x"])]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return {"loss": float(done.stdout.partition("=")[2])}
tuner = tune.Tuner(
    tune.with_resources(objective, {"cpu": 1}),
    param_space={"x": tune.uniform(0, 1)},
    tune_config=tune.TuneConfig(num_samples=TRIALS, max_concurrent_trials=2),
)
assert len(tuner.fit()) == TRIALS
"""


class Sweeps:
    """Sweeps in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = clean_environ(CLOUDTRAIN_HOME=str(folder / "home"))

    def command(self, *words: str) -> dict[str, Any]:
        """Run a command with --json; return its answer."""
        done = subprocess.run(
            [BIN / "cloudtrain", *words, "--json"],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"cloudtrain {' '.join(words)} failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def write(self, name: str, text: str, **values: object) -> str:
        """Write a sweep file with values in place of words in capitals; return its name."""
        for word, value in values.items():
            text = text.replace(word, str(value))
        (self.folder / name).write_text(text)
        return name

    def write_job(self, example: str, changes: Mapping[str, str]) -> str:
        """Write the job file of an example with changes of its text; return its name."""
        source = REPOSITORY / "examples" / example
        text = (source / "job.yaml").read_text().replace("  directory: .\n", "")
        for old, new in changes.items():
            if old not in text:
                sys.exit(f"{example}/job.yaml has no {old!r}")
            text = text.replace(old, new)
        (self.folder / f"{example}.yaml").write_text(text.replace("FOLDER", str(source)))
        return f"{example}.yaml"

    def kill_at(self, sweep: str, trials: int) -> None:
        """Kill the controller when so many trials have started."""
        log = self.folder / "home" / "sweeps" / sweep / "controller.log"
        while log.read_text().count(" RUNNING") < trials:
            time.sleep(0.05)
        found = subprocess.run(
            ["pgrep", "-f", f"cloudtrain.features.sweeps .*{sweep}$"],
            capture_output=True,
            text=True,
            check=True,
        )
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)


def measure_kills(session: Session, sweeps: Sweeps) -> list[str]:
    """Return the table of the sweep whose controller is killed."""
    changes = {
        "{task: digits:Digits}": '{directory: FOLDER, task: "digits:Digits"}',
        "  epochs: 12\n": "  steps: 20\n",
    }
    job, trials = sweeps.write_job("digits", changes), session.options.trials
    file = sweeps.write("digits-sweep.yaml", DIGITS, JOB=job, TRIALS=trials)
    began = time.perf_counter()
    sweep = sweeps.command("sweep", file, "--local")["sweep"]
    for share in (0.3, 0.6):
        sweeps.kill_at(sweep, int(share * trials))
        session.require(
            sweeps.command("sweep", file, "--local")["sweep"] == sweep, "another sweep was started"
        )
    found = sweeps.command("sweep", "follow", sweep)
    seconds = time.perf_counter() - began
    runs = sweeps.command("list", "--tag", f"sweep={sweep}")["runs"]
    session.require(
        len(found["trials"]) == len(runs) == trials,
        f"{len(found['trials'])} trials, {len(runs)} runs",
    )
    best = sweeps.command("sweep", "best", sweep, "--write", "best.yaml")
    again = sweeps.command("submit", "best.yaml", "--local", "--follow")["metrics"][
        "validation/accuracy"
    ]
    rows = [
        ("trials asked for, recorded, and runs", f"{trials}, {len(found['trials'])}, {len(runs)}"),
        ("trials that succeeded", sum(trial["state"] == "SUCCEEDED" for trial in found["trials"])),
        (
            "best validation accuracy, and that of its job run again",
            f"{best['objective']:.4f}, {again:.4f}",
        ),
        ("seconds", f"{seconds:.0f}"),
    ]
    return markdown_table(["controller killed twice", ""], rows)


def measure_halving(session: Session, sweeps: Sweeps) -> list[str]:
    """Return the table of ASHA and random search."""
    changes = {
        "task: gpt:GPT": "directory: FOLDER\n  task: gpt:GPT",
        "layers: 2, width: 96": "layers: 1, width: 48",
        "files: 60": "files: 30",
        "steps: 300": "steps: 90",
        "evaluate: {every: 100 steps}": "evaluate: {every: 10 steps}",
        "every: 25 steps": "every: 10 steps",
    }
    job, rows, best = sweeps.write_job("gpt-stdlib", changes), [], {}
    for strategy in ("random", "hyperband"):
        trials = session.options.gpt_trials
        file = sweeps.write(f"{strategy}.yaml", GPT, JOB=job, STRATEGY=strategy, TRIALS=trials)
        began = time.perf_counter()
        found = sweeps.command("sweep", file, "--local", "--follow")
        seconds = time.perf_counter() - began
        log = (sweeps.folder / "home" / "sweeps" / found["sweep"] / "controller.log").read_text()
        steps = sum(_steps_of(trial["number"], log) for trial in found["trials"])
        best[strategy] = found["best"]["objective"], steps
        rows.append(
            (strategy, trials, steps, f"{found['best']['objective']:.4f}", f"{seconds:.0f}")
        )
    (random_loss, random_steps), (asha_loss, asha_steps) = best["random"], best["hyperband"]
    session.require(asha_steps < random_steps, "no trial ended early")
    if asha_loss > random_loss + NOISE or asha_steps > random_steps / 2:
        session.faults.append(f"ASHA reached {asha_loss:.4f} with {asha_steps} steps")
    return markdown_table(
        ["strategy", "trials", "steps of all trials", "best validation loss", "seconds"], rows
    )


def _steps_of(number: int, log: str) -> int:
    """Return the steps that a trial has trained, all its runs together: each continues the one before it."""
    lines = [line for line in log.splitlines() if f" trial {number} RUNNING" in line]
    lengths = [
        int(line.partition(" length=")[2].split(",")[0]) for line in lines if " length=" in line
    ]
    return max(lengths, default=90)


def measure_overhead(session: Session, sweeps: Sweeps) -> list[str]:
    """Return the table of the overhead per trial."""
    trials = session.options.trials
    (sweeps.folder / "empty.py").write_text(SCRIPT)
    file = sweeps.write("empty.yaml", EMPTY, TRIALS=trials)
    programs = {
        "plain Optuna, one process per trial": (sys.executable, PLAIN_OPTUNA),
        "the processes alone": (sys.executable, FLOOR),
    }
    if session.options.ray:
        programs["Ray Tune, one process per trial in an actor"] = (session.options.ray, RAY_TUNE)
    began = time.perf_counter()
    found = sweeps.command("sweep", file, "--local", "--follow")
    rows = [("cloudtrain sweep, one run per trial", time.perf_counter() - began)]
    session.require(len(found["trials"]) == trials, f"{len(found['trials'])} trials")
    if rows[0][1] > MOST_SECONDS * trials:
        session.faults.append(f"{rows[0][1] / trials:.2f} s per trial of an empty script")
    for name, (python, program) in programs.items():
        text = program.replace("TRIALS", str(trials)).replace("FOLDER", repr(str(sweeps.folder)))
        environ = {
            **sweeps.environ,
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "RAY_AIR_NEW_OUTPUT": "0",
        }
        rows.append((name, session.run_command(name, [python, "-c", text], sweeps.folder, environ)))
    cells = [(name, f"{seconds:.1f}", f"{seconds / trials:.2f}") for name, seconds in rows]
    return markdown_table(
        [f"{trials} trials of an empty script, two at a time", "seconds", "per trial"], cells
    )


def measure(session: Session) -> list[str]:
    """Return the three tables."""
    with tempfile.TemporaryDirectory() as folder:
        sweeps = Sweeps(Path(folder))
        tables = [
            measure_overhead(session, sweeps),
            measure_halving(session, sweeps),
            measure_kills(session, sweeps),
        ]
    return [line for table in tables for line in (*table, "")]


if __name__ == "__main__":
    BENCHMARK.main(measure)
