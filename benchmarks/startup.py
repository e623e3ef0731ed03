"""Measure start-up of the command line, and a local run against plain torchrun.

    .venv/bin/python benchmarks/startup.py [--rounds 9] [--write FILE]

The times are wall-clock times of entire processes. The commands of a group alternate, so that other load on the machine
affects all of them. The tables show medians, and medians of the ratios within each round.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from measure import BIN, REPOSITORY, Benchmark, Peer, Session, alternate, table

HEAVY = ("boto3", "torch", "sagemaker")
JOB = "examples/digits/job.yaml"
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="imports of boto3 and of the SageMaker SDK, and plain torchrun with the same script and 2 processes",
    goal="`validate` and `plan` in 1/8 of the SDK's import, a local run in the time of torchrun's",
    mechanism=f"`cloudtrain validate` and `plan` imported none of {', '.join(HEAVY)}",
    rounds=9,
    packages=("torch", "sagemaker", "boto3"),
)


def check_imports(session: Session, environ: Mapping[str, str]) -> None:
    """Exit if a command that plans imports one of the heavy packages."""
    for verb in ("validate", "plan"):
        command = [sys.executable, "-X", "importtime", "-m", "cloudtrain", verb, JOB]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=True
        )
        imported = {
            line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
        }
        session.require(
            imported.isdisjoint(HEAVY), f"{verb} imports {sorted(imported & set(HEAVY))}"
        )


def measure(session: Session) -> list[str]:
    """Return both tables."""
    cloudtrain, python = str(BIN / "cloudtrain"), sys.executable
    example = REPOSITORY / "examples" / "script-ddp"
    environ = {
        **os.environ,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
    }

    def start(name: str, *argv: str, goal: str = "") -> Peer:
        return session.command(name, argv, REPOSITORY, environ, goal)

    with tempfile.TemporaryDirectory() as folder:
        environ |= {
            "SM_MODEL_DIR": folder,
            "CLOUDTRAIN_HOME": f"{folder}/home",
            "OMP_NUM_THREADS": "1",
        }
        check_imports(session, environ)
        starts = [
            start("`cloudtrain --help`", cloudtrain, "--help", goal="0.20 s"),
            start(
                "`cloudtrain validate`",
                cloudtrain,
                "validate",
                JOB,
                goal="0.40 s, 1/8 of the import",
            ),
            start("`cloudtrain plan`", cloudtrain, "plan", JOB, goal="0.40 s, 1/8 of the import"),
            # What reads and checks a job file takes at least this.
            start("`import pydantic`, the floor", python, "-c", "from pydantic import BaseModel"),
            start("`import boto3`", python, "-c", "import boto3"),
            start(
                "`import sagemaker.pytorch`",
                python,
                "-W",
                "ignore",
                "-c",
                "import sagemaker.pytorch",
            ),
        ]
        script = Path(
            shutil.copytree(example, f"{folder}/script")
        )  # torchrun saves its checkpoints there
        submit = [cloudtrain, "submit", str(example / "job.yaml"), "--local", "--follow"]
        torchrun = [
            str(BIN / "torchrun"),
            "--nproc-per-node",
            "2",
            "train.py",
            "--epochs",
            "3",
            "--lr",
            "0.1",
        ]
        own, other = "`cloudtrain submit --local`, 2 processes", "`torchrun`, the same script"

        def train_with_torchrun() -> float:
            shutil.rmtree(
                script / "checkpoints", ignore_errors=True
            )  # else it would resume at the end of the training
            return session.run_command(other, torchrun, script, environ)

        runs = [
            session.command(own, submit, Path(folder), environ, "1.0 x torchrun"),
            Peer(other, train_with_torchrun),
        ]
        lines = table("command", alternate(starts, session.rounds), base=starts[-1].name)
        return [*lines, "", *table("command", alternate(runs, session.rounds), base=runs[-1].name)]


if __name__ == "__main__":
    BENCHMARK.main(measure)
