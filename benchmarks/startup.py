"""Measure start-up of the command line, and a local run against plain torchrun.

    make benchmarks            # or: .venv/bin/python benchmarks/startup.py [--runs N] [--write FILE]

The times are wall-clock times of entire processes. The commands of a group alternate, so that other load on the machine
affects all of them. The tables show medians, and medians of the ratios within each turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from measure import BIN, REPOSITORY, Command, describe_machine, measure, replace_marked, table


def starts() -> list[Command]:
    """Return the commands whose start-up is measured, and the commands to compare with."""
    cloudtrain, python, job = str(BIN / "cloudtrain"), sys.executable, "examples/digits/job.yaml"
    return [
        Command("`cloudtrain --help`", [cloudtrain, "--help"], REPOSITORY, "0.20 s"),
        Command("`cloudtrain validate`", [cloudtrain, "validate", job], REPOSITORY, "0.40 s, 1/8 of the import"),
        Command("`cloudtrain plan`", [cloudtrain, "plan", job], REPOSITORY, "0.40 s, 1/8 of the import"),
        Command("`import boto3`", [python, "-c", "import boto3"], REPOSITORY),
        Command("`import sagemaker.pytorch`", [python, "-W", "ignore", "-c", "import sagemaker.pytorch"], REPOSITORY),
    ]


def runs(folder: Path) -> list[Command]:
    """Return the same script under cloudtrain and under torchrun, with two processes."""
    example = REPOSITORY / "examples" / "script-ddp"
    submit = [str(BIN / "cloudtrain"), "submit", str(example / "job.yaml"), "--local", "--follow"]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "train.py", "--epochs", "3", "--lr", "0.1"]
    return [
        Command("`cloudtrain submit --local`, 2 processes", submit, folder, "1.15 x torchrun"),
        Command("`torchrun`, the same script", torchrun, example),
    ]


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="counted turns of the start-up commands")
    parser.add_argument("--run-turns", type=int, default=5, help="counted turns of the training runs")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    options = parser.parse_args()
    environ = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true", "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        environ |= {"SM_MODEL_DIR": folder, "CLOUDTRAIN_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1"}
        first, second = starts(), runs(Path(folder))
        failed: Counter[str] = Counter()
        lines = table(first, measure(first, options.runs, environ, failed), "`import sagemaker.pytorch`")
        measured = measure(second, options.run_turns, environ, failed)
        lines += ["", *table(second, measured, "`torchrun`, the same script")]
    machine = f"{describe_machine()}, torch {torch.__version__}"
    lines += ["", f"Medians of {options.runs} and {options.run_turns} alternating turns on {machine}."]
    lines += [f"{name}: {count} runs failed and were repeated." for name, count in sorted(failed.items())]
    text = "\n".join(lines)
    print(text)
    if options.write is not None:
        replace_marked(options.write, text)


if __name__ == "__main__":
    main()
