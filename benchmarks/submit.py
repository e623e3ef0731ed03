"""Measure a submit and a hand-written estimator script (estimator_submit.py) with a moto server on loopback.

    .venv/bin/python benchmarks/submit.py [--turns 7] [--megabytes 200] [--write benchmarks/results/submit.md]

The times are wall-clock times of entire processes. The commands of a group alternate. Each starts with an empty
account: nothing in S3, no packed code. The table also shows the CPU time of the server during each command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import BIN, REPOSITORY, Command, describe_machine, replace_marked, run_once
from packing import make_tree

BUCKET, ROLE = "cloudtrain-benchmark", "training"
_FILES = 400
_SETTLE_SECONDS = 3.0
"""Digests of files that have just changed are not cached."""
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
_JOB = """\
name: large
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
limits: {runtime: 1h}
"""


@dataclass(frozen=True)
class Account:
    """The server, and the environment of its clients."""

    server: psutil.Process
    environ: dict[str, str]
    home: Path

    def renew(self) -> None:
        """Reset the server and the local state, except for the bucket and the role."""
        endpoint = self.environ["AWS_ENDPOINT_URL"]
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()  # noqa: S310
        region = self.environ["AWS_DEFAULT_REGION"]
        _client("s3", self.environ).create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": region}
        )
        iam = _client("iam", self.environ)
        iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(_TRUST))
        shutil.rmtree(self.home, ignore_errors=True)

    def cpu_seconds(self) -> float:
        """CPU time of the server so far, in seconds."""
        times = self.server.cpu_times()
        return float(times.user + times.system)


@dataclass
class Measured:
    """Measurements of one command."""

    seconds: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)


def commands(job: Path, entry_point: str) -> list[tuple[Command, bool]]:
    """Return the script and the commands to compare with it, each with whether it needs an empty account."""
    script = [sys.executable, "-W", "ignore", str(REPOSITORY / "benchmarks" / "estimator_submit.py")]
    submit = [str(BIN / "cloudtrain"), "submit", str(job), "--instances", "2"]
    where = job.parent
    # Another limit makes it another job; an identical one would attach to the existing run.
    other = [*submit, "--set", "limits.runtime=2h", "--skip-check"]
    return [
        (Command("estimator script", [*script, str(where), entry_point], where), True),
        (Command("`cloudtrain submit --skip-check`, first", [*submit, "--skip-check"], where, "at most 1.0"), True),
        (Command("`cloudtrain submit --skip-check`, unchanged code", other, where, "at most 0.5"), False),
        (Command("`cloudtrain submit`, first, with its checks", submit, where), True),
    ]


def measure(case: list[tuple[Command, bool]], turns: int, account: Account) -> dict[str, Measured]:
    """Run the commands alternately, once to warm up and then `turns` times."""
    found = {command.name: Measured() for command, _ in case}
    failed: Counter[str] = Counter()
    for turn in range(turns + 1):
        for command, is_new in case:
            if is_new:
                account.renew()
            before = account.cpu_seconds()
            took = run_once(command, account.environ, failed)
            if turn > 0:
                found[command.name].seconds.append(took)
                found[command.name].server.append(account.cpu_seconds() - before)
    if failed:
        sys.exit(f"commands failed: {dict(failed)}")
    return found


def table(title: str, case: list[tuple[Command, bool]], found: dict[str, Measured]) -> list[str]:
    """Return a Markdown table; ratios are medians of those within a turn."""
    script = found[case[0][0].name].seconds
    lines = [f"| {title} | median s | min to max | x script | goal | server's CPU s |", "|---|---|---|---|---|---|"]
    for command, _ in case:
        own = found[command.name]
        ratio = statistics.median(a / b for a, b in zip(own.seconds, script, strict=True))
        spread = f"{min(own.seconds):.2f} to {max(own.seconds):.2f}"
        middle, server = statistics.median(own.seconds), statistics.median(own.server)
        lines.append(f"| {command.name} | {middle:.2f} | {spread} | {ratio:.2f} | {command.goal} | {server:.2f} |")
    return lines


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Account]:
    """Serve moto until the block ends."""
    program = [sys.executable, str(REPOSITORY / "tests" / "support" / "moto_server.py")]
    with (folder / "moto.log").open("w") as errors:
        server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert server.stdout is not None  # noqa: S101 (stdout is a pipe)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CLOUDTRAIN_"))}
    try:
        yield Account(
            psutil.Process(server.pid),
            {
                **clean,
                "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-west-2",
                "AWS_EC2_METADATA_DISABLED": "true",
                "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
                "HOME": str(folder),
                "CLOUDTRAIN_HOME": str(folder / "home"),
                "CLOUDTRAIN_BUCKET": BUCKET,
                "CLOUDTRAIN_ROLE": f"arn:aws:iam::123456789012:role/{ROLE}",
            },
            folder / "home",
        )
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


def _client(service: str, environ: dict[str, str]) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=environ["AWS_ENDPOINT_URL"],
        region_name=environ["AWS_DEFAULT_REGION"],
        aws_access_key_id=environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
    )


def make_large(folder: Path, total_bytes: int) -> Path:
    """Write a code folder of this size; return its job file."""
    make_tree(folder, files=_FILES, total_bytes=total_bytes)
    (folder / "train.py").write_text("print('training')\n")
    (folder / "job.yaml").write_text(_JOB)
    return folder / "job.yaml"


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="counted turns of each command")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the large code folder")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    options = parser.parse_args()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as account:
        large = make_large(Path(folder, "large"), options.megabytes * 10**6)
        time.sleep(_SETTLE_SECONDS)
        for title, job, entry_point in (
            ("`examples/digits`", REPOSITORY / "examples" / "digits" / "job.yaml", "digits.py"),
            (f"{options.megabytes} MB in {_FILES} files", large, "train.py"),
        ):
            case = commands(job, entry_point)
            lines += [*table(title, case, measure(case, options.turns, account)), ""]
    machine = f"{describe_machine()}, shared with the server"
    lines.append(f"Medians of {options.turns} alternating turns on {machine}.")
    text = "\n".join(lines)
    print(text)
    if options.write is not None:
        replace_marked(options.write, text)


if __name__ == "__main__":
    main()
