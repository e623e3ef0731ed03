"""Trials of the whole product on a machine with a GPU: jobs that must succeed, and failures that must be explained.

Each trial is a run of its own with the command line; `gpu_day.py` starts several side by side.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_figures

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
OWN_JOBS = Path(__file__).parent / "trials"
SUCCEEDED, RUN_FAILED = 0, 4
"""Exit codes of `submit --follow`."""


@dataclass(frozen=True)
class Trial:
    """One command, and what must come of it.

    Attributes:
        name: Its name in the results.
        command: Arguments of `cloudtrain`.
        code: Exit code that is expected.
        shows: Patterns that the output must contain.
        explained: Pattern that `explain` must print about the run; empty asks nothing.
        never_advised: Pattern that `explain` must not print.
        packages: What the job imports and a machine may lack.
        needs_gpu: Whether it cannot run with CLOUDTRAIN_GPU_TRIAL=cpu.
        seconds: Limit of its duration.
    """

    name: str
    command: tuple[str, ...]
    code: int = SUCCEEDED
    shows: tuple[str, ...] = ()
    explained: str = ""
    never_advised: str = ""
    packages: tuple[str, ...] = ()
    needs_gpu: bool = False
    seconds: float = 90.0


def run_job(job: Path, *options: str) -> tuple[str, ...]:
    """Return the arguments that run a job and wait for its end."""
    return ("submit", str(job / "job.yaml"), "--local", "--follow", *options)


def failing(name: str, explained: str, **others: str) -> Trial:
    """Return a trial of a job that fails, and whose failure has an explanation."""
    return Trial(
        name,
        run_job(OWN_JOBS / name),
        code=RUN_FAILED,
        explained=explained,
        needs_gpu=True,
        **others,
    )


TRIALS: Sequence[Trial] = (
    Trial(
        "digits",
        run_job(EXAMPLES / "digits", "--set", "train.precision=bf16"),
        packages=("sklearn",),
    ),
    Trial(
        "digits on two instances",
        run_job(EXAMPLES / "digits", "--instances", "2", "--set", "train.epochs=4"),
        packages=("sklearn",),
    ),
    Trial(
        "two_instances",
        run_job(OWN_JOBS / "two_instances"),
        shows=("rank 0 sum 2", "rank 1 sum 2"),
        needs_gpu=True,
    ),
    failing("out_of_memory", explained="memory", never_advised=r"train\.batch_size"),
    failing("device_assert", explained="assert|index"),
    failing("stuck_kernel", explained="hang|no progress"),
    Trial(
        "rehearse digits",
        ("rehearse", str(EXAMPLES / "digits" / "job.yaml")),
        packages=("sklearn",),
        seconds=200.0,
    ),
    Trial("gpt-stdlib", run_job(EXAMPLES / "gpt-stdlib", "--set", "train.precision=bf16")),
    Trial("script-ddp", run_job(EXAMPLES / "script-ddp"), packages=("sklearn",)),
    Trial("script-spawn", run_job(EXAMPLES / "script-spawn")),
    Trial("script-launch", run_job(EXAMPLES / "script-launch"), packages=("sklearn",)),
    Trial("script-sagemaker", run_job(EXAMPLES / "script-sagemaker")),
    Trial("first-contact", run_job(EXAMPLES / "first-contact")),
    Trial(
        "script-lightning",
        run_job(EXAMPLES / "script-lightning"),
        packages=("lightning", "sklearn"),
    ),
    Trial(
        "script-accelerate",
        run_job(EXAMPLES / "script-accelerate"),
        packages=("accelerate", "sklearn"),
    ),
    Trial(
        "transformers_trainer",
        run_job(OWN_JOBS / "transformers_trainer"),
        packages=("transformers", "accelerate"),
    ),
    Trial("doctor", ("doctor",)),
    Trial("list", ("list",)),
)


def why_not(trial: Trial, *, has_gpu: bool) -> str:
    """Return why a trial cannot run on this machine, or an empty string."""
    if trial.needs_gpu and not has_gpu:
        return "needs a GPU"
    missing = [each for each in trial.packages if importlib.util.find_spec(each) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    return ""


def run_trial(
    trial: Trial, cloudtrain: Sequence[str], environ: Mapping[str, str], folder: Path
) -> gpu_figures.TestResult:
    """Run a trial; return its outcome. Its output, and what was wrong, is in `<name>.log` of the folder.

    Args:
        trial: The trial.
        cloudtrain: The command that starts cloudtrain.
        environ: Its environment, without the home.
        folder: Where its log and its runs are written.
    """
    began = time.monotonic()
    log = folder / f"{trial.name.replace(' ', '-')}.log"
    place = {**environ, "CLOUDTRAIN_HOME": str(folder / "home")}
    code, output = _run([*cloudtrain, *trial.command], place, log, trial.seconds)
    problems = [f"exit code {code} instead of {trial.code}"] if code != trial.code else []
    problems += [
        f"no {each!r} in the output" for each in trial.shows if not re.search(each, output)
    ]
    if trial.explained:
        run = _run_id(output)
        _, text = _run([*cloudtrain, "explain", run], place, log, trial.seconds)
        if not re.search(trial.explained, text, re.IGNORECASE):
            problems.append(f"explain does not mention {trial.explained!r}")
        if trial.never_advised and re.search(trial.never_advised, text):
            problems.append(f"explain advises {trial.never_advised!r}")
    with log.open("a") as file:
        print(*(f"PROBLEM: {each}" for each in problems), sep="\n", file=file)
    seconds = round(time.monotonic() - began, 2)
    return gpu_figures.TestResult(
        f"trial::{trial.name}", "failed" if problems else "passed", seconds
    )


def _run(
    command: Sequence[str], environ: Mapping[str, str], log: Path, seconds: float
) -> tuple[int, str]:
    """Run a command, appending its output to a log; return its exit code and output."""
    try:
        done = subprocess.run(
            command,
            env={**environ, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code = os.EX_TEMPFAIL
        output = (error.stdout or b"").decode(errors="replace")
        output += f"\nnot ended after {seconds:.0f} s\n"
    with log.open("a") as file:
        print("$", *command, file=file)
        print(output, file=file)
    return code, output


def _run_id(output: str) -> str:
    """Return the run that a command has started."""
    found = re.search(r"\b(?:local:)?[a-z][a-z0-9-]*-\d{6}-\d{6}-[0-9a-f]{6}\b", output)
    return found[0] if found else "latest"
