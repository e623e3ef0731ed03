"""Measure a submit and a hand-written estimator script (estimator_submit.py) with a moto server on loopback.

    .venv/bin/python benchmarks/submit.py [--rounds 7] [--megabytes 200] [--write benchmarks/results/submit.md]

The times are wall-clock times of entire processes. The commands of a group alternate. Each starts with an empty
account: nothing in S3, no packed code. The table also shows the CPU time of the server during each command, which
shares the machine.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from measure import (
    BIN,
    REPOSITORY,
    SECONDS,
    Benchmark,
    Figures,
    Peer,
    Session,
    alternate,
    clean_environ,
    table,
)
from packing import SETTLE_SECONDS, make_tree
from support.jobs import serve_moto

BUCKET, ROLE = "cloudtrain-benchmark", "training"
_FILES = 400
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
_JOB = """\
name: large
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
limits: {runtime: 1h}
"""
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a script that is hand-written with the SageMaker SDK, for the same kind of job",
    goal="at most the script's time, and half of it for unchanged code",
    mechanism="new code was uploaded once, and unchanged code was not",
    options={"megabytes": (200, "size of the large code folder")},
    packages=("sagemaker", "boto3", "moto"),
)


@dataclass(frozen=True)
class Account:
    """The server, and the environment of its clients."""

    server: psutil.Process
    environ: dict[str, str]
    home: Path

    def client(self, service: str) -> Any:
        """Return a client of the account."""
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.environ["AWS_ENDPOINT_URL"],
            region_name=self.environ["AWS_DEFAULT_REGION"],
            aws_access_key_id=self.environ["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environ["AWS_SECRET_ACCESS_KEY"],
        )

    def renew(self) -> None:
        """Reset the server and the local state, except for the bucket and the role."""
        endpoint, region = self.environ["AWS_ENDPOINT_URL"], self.environ["AWS_DEFAULT_REGION"]
        urllib.request.urlopen(  # noqa: S310
            urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")  # noqa: S310
        ).close()
        self.client("s3").create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": region}
        )
        self.client("iam").create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(_TRUST))
        shutil.rmtree(self.home, ignore_errors=True)

    def bundles(self) -> dict[str, Any]:
        """Return when each bundle of cloudtrain was uploaded, by key."""
        objects = self.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {
            each["Key"]: each["LastModified"] for each in objects if "/code/" in f"/{each['Key']}"
        }

    def cpu_seconds(self) -> float:
        """CPU time of the server so far, in seconds."""
        times = self.server.cpu_times()
        return float(times.user + times.system)


def peers(session: Session, account: Account, job: Path, entry_point: str) -> list[Peer]:
    """Return the script and the commands to compare with it."""
    script = [
        sys.executable,
        "-W",
        "ignore",
        str(REPOSITORY / "benchmarks" / "estimator_submit.py"),
    ]
    submit = [str(BIN / "cloudtrain"), "submit", str(job), "--instances", "2"]

    def peer(
        name: str, argv: list[str], uploads: int, *, is_new: bool = True, goal: str = ""
    ) -> Peer:
        def run() -> Figures:
            if is_new:
                account.renew()
            before, bundles = account.cpu_seconds(), account.bundles()
            seconds = session.run_command(name, argv, job.parent, account.environ)
            server = account.cpu_seconds() - before
            uploaded = [key for key, at in account.bundles().items() if bundles.get(key) != at]
            session.require(
                len(uploaded) == uploads, f"{name} uploaded {len(uploaded)} bundles, not {uploads}"
            )
            return {SECONDS: seconds, "server": server}

        return Peer(name, run, goal)

    # Another limit makes it another job; an identical one would attach to the existing run.
    other = [*submit, "--set", "limits.runtime=2h", "--skip-check"]
    first, again = (
        "`cloudtrain submit --skip-check`, first",
        "`cloudtrain submit --skip-check`, unchanged code",
    )
    # What every submit through the SDK takes at least.
    imports = "import gc; gc.disable(); import boto3, sagemaker.pytorch"
    alone = [sys.executable, "-W", "ignore", "-c", f"{imports}; import os; os._exit(0)"]
    return [
        peer("import of the SDK alone, the floor", alone, 0),
        peer("estimator script", [*script, str(job.parent), entry_point], 0),
        peer(first, [*submit, "--skip-check"], 1, goal="at most 1.0"),
        peer(again, other, 0, is_new=False, goal="at most 0.5"),
        peer("`cloudtrain submit`, first, with its checks", submit, 1),
    ]


def measure(session: Session) -> list[str]:
    """Return a table for a small and for a large code folder."""
    megabytes = session.options.megabytes
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, serve_moto(Path(folder, "moto.log")) as endpoint:
        (server,) = psutil.Process().children()
        environ = clean_environ(
            AWS_ENDPOINT_URL=endpoint,
            HOME=folder,
            CLOUDTRAIN_HOME=f"{folder}/home",
            CLOUDTRAIN_BUCKET=BUCKET,
            CLOUDTRAIN_ROLE=f"arn:aws:iam::123456789012:role/{ROLE}",
        )
        account = Account(server, environ, Path(folder, "home"))
        large = Path(folder, "large")
        make_tree(large, files=_FILES, total_bytes=megabytes * 10**6)
        (large / "train.py").write_text("print('training')\n")
        (large / "job.yaml").write_text(_JOB)
        time.sleep(SETTLE_SECONDS)
        digits = REPOSITORY / "examples" / "digits" / "job.yaml"
        for title, job, entry_point in (
            ("`examples/digits`", digits, "digits.py"),
            (f"{megabytes} MB in {_FILES} files", large / "job.yaml", "train.py"),
        ):
            found = alternate(peers(session, account, job, entry_point), session.rounds)
            columns = {"server's CPU s": lambda own: f"{own.median('server'):.2f}"}
            lines += [*table(title, found, base="estimator script", columns=columns), ""]
    if session.repeated:
        sys.exit(f"commands failed: {dict(session.repeated)}")
    return lines[:-1]


if __name__ == "__main__":
    BENCHMARK.main(measure)
