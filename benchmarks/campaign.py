"""Fault campaign: many runs are submitted, followed and stopped while calls fail and clients are killed.

    python benchmarks/campaign.py --runs 200 --write benchmarks/results/campaign.md

Every run is a training job of the sandbox that really runs. Random calls of the clients are throttled, fail with status
500, lose their response, or get half of it. Clients are killed by SIGKILL at random moments and started again, as a
user would do. At the end each run must have one job, the expected final state, each line of its log once and in order,
and no traceback. Any difference is printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.aws.errors import make_client

COMMAND = Path(sys.executable).with_name("cloudtrain")
FAULT_PLAN = {
    "throttle": {"*": 0.04},
    "errors": {"*": 0.03},
    "resets": {"*": 0.03},
    "torn": {"*": 0.01},
}
ENDS = {"succeed": (0, "Completed"), "fail": (4, "Failed"), "stop": (5, "Stopped")}
"""Exit code of `--follow` and TrainingJobStatus, by how the run ends."""

JOB = """\
name: {name}
code: {{script: talk.py, args: [{end}, "{lines}", {release}]}}
cluster: {{instance_type: ml.m5.large, processes_per_instance: 1}}
limits: {{runtime: 10m}}
"""
SCRIPT = """\
import os
import random
import sys
import time

end, lines, release = sys.argv[1], int(sys.argv[2]), sys.argv[3]
for number in range(lines):
    print(f"line {number} of {lines}", flush=True)
    time.sleep(random.random() * 0.02)
while end == "stop" or not os.path.exists(release):
    time.sleep(0.1)  # the next submit would start an ended run again
if end == "fail":
    sys.exit("the data has no column of this name")
"""
_RUN = re.compile(r"sagemaker:(\S+) (?:submitted|is the same)")
_REFUSED = 3
_TRIES = 20
_LINE = re.compile(r"algo-1\s+line (\d+) of (\d+)$")


@dataclass
class RunResult:
    """Result of one run.

    Attributes:
        end: How the run was meant to end.
        faults: Differences from the expected result, a sentence each.
        kills: Number of killed clients.
        seconds: Duration.
    """

    end: str
    faults: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the figures to this file, too")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _sandbox(Path(folder)) as environment:
        campaign = Campaign(Path(folder), environment, arguments.seed)
        with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
            results = list(pool.map(campaign.run, range(arguments.runs)))
    text = _report(results, time.monotonic() - started, arguments.seed)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    return 1 if any(each.faults for each in results) else 0


@contextmanager
def _sandbox(folder: Path) -> Iterator[dict[str, str]]:
    """Start a sandbox; yield the environment of its clients."""
    process = subprocess.Popen(
        [str(COMMAND), "sandbox", "--home", str(folder / "sandbox"), "--grace", "5"], stdout=subprocess.PIPE, text=True
    )
    try:
        info = json.loads(process.stdout.readline() if process.stdout is not None else "")
        yield {**os.environ, **info["environment"], "CLOUDTRAIN_TRANSPORT": "boto3", "TERM": "dumb"}
    finally:
        process.terminate()
        process.wait()


class Campaign:
    """Runs of one sandbox."""

    def __init__(self, folder: Path, environment: Mapping[str, str], seed: int) -> None:
        self._folder = folder
        self._environment = environment
        self._seed = seed
        self._set_faults(FAULT_PLAN | {"seed": seed})

    def run(self, number: int) -> RunResult:
        """Execute one run; record errors in its result."""
        rng = random.Random(f"{self._seed}:{number}")  # noqa: S311 (no secret)
        result = RunResult(rng.choice(list(ENDS)))
        started = time.monotonic()
        try:
            self._submit_and_follow(number, rng, result)
        except Exception as error:  # noqa: BLE001 (recorded as a fault)
            result.faults.append(f"run {number}: {type(error).__name__}: {error}")
        result.seconds = time.monotonic() - started
        return result

    def _submit_and_follow(self, number: int, rng: random.Random, result: RunResult) -> None:
        name, lines = f"campaign-{number}", rng.randrange(50, 200)
        job = self._write(name, result.end, lines)
        follow = ["submit", str(job), "--skip-check", "--follow", "--json"]
        for _ in range(rng.choice((0, 0, 1, 2))):
            result.kills += self._kill(follow, rng.random() * 8)
        done = self._finish(follow, job.parent / "release", rng, result)
        self._compare(name, lines, done, result)

    def _write(self, name: str, end: str, lines: int) -> Path:
        folder = self._folder / name
        folder.mkdir()
        (folder / "talk.py").write_text(SCRIPT)
        (folder / "job.yaml").write_text(JOB.format(name=name, end=end, lines=lines, release=folder / "release"))
        return folder / "job.yaml"

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(COMMAND), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(self._environment),
            cwd=self._folder,
        )

    def _kill(self, arguments: list[str], seconds: float) -> int:
        """Start a client and kill it; return 1 if it was still running, else 0."""
        client = self._start(arguments)
        try:
            client.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            client.kill()
            client.communicate()
            return 1
        return 0

    def _finish(
        self, arguments: list[str], release: Path, rng: random.Random, result: RunResult
    ) -> subprocess.CompletedProcess[str]:
        """Follow a run to its end; repeat commands that AWS rejected (exit code 3), as a user would.

        The run waits until it is followed. Then it is released, or another client stops it.
        """
        for _ in range(_TRIES):
            client = self._start(arguments)
            errors: list[str] = []
            reader = threading.Thread(target=errors.extend, args=(client.stderr,), daemon=True)
            reader.start()
            while not (found := _RUN.search("".join(errors))) and client.poll() is None:
                time.sleep(0.1)
            if found is not None and result.end == "stop":
                self._stop(found[1], rng, result)
            if found is not None:
                release.touch()
            out = client.stdout.read() if client.stdout is not None else ""
            client.wait(300)
            reader.join()
            if client.returncode != _REFUSED or "Traceback" in "".join(errors):
                break
        return subprocess.CompletedProcess(arguments, client.returncode, out, "".join(errors))

    def _stop(self, run: str, rng: random.Random, result: RunResult) -> None:
        """Stop a run after a random time, with clients that may be killed, too."""
        time.sleep(rng.random() * 8)
        stop = ["stop", f"sagemaker:{run}", "--no-wait"]
        if rng.random() < 0.5:  # noqa: PLR2004 (every other one)
            result.kills += self._kill(stop, rng.random())
        for _ in range(_TRIES):
            client = self._start(stop)
            client.communicate(timeout=300)
            if client.returncode != _REFUSED:
                return

    def _compare(self, name: str, lines: int, done: subprocess.CompletedProcess[str], result: RunResult) -> None:
        """Compare one run with the expected result."""
        code, status = ENDS[result.end]
        jobs = self._jobs(name)
        if len(jobs) != 1:
            result.faults.append(f"{name}: {len(jobs)} jobs")
        if [job["TrainingJobStatus"] for job in jobs] != [status]:
            result.faults.append(f"{name}: is {[job['TrainingJobStatus'] for job in jobs]}, not {status}")
        if done.returncode != code:
            result.faults.append(f"{name}: exit code {done.returncode}, not {code}: {done.stderr[-2000:]}")
        if "Traceback" in done.stderr:
            result.faults.append(f"{name}: {done.stderr[-2000:]}")
        seen = [int(match[1]) for line in done.stderr.splitlines() if (match := _LINE.search(line.rstrip()))]
        wanted = list(range(lines)) if result.end != "stop" else list(range(len(seen)))
        if seen != wanted:
            result.faults.append(f"{name}: {len(seen)} lines of {lines}, or in another order")

    def _jobs(self, name: str) -> list[dict[str, Any]]:
        import boto3
        from botocore.config import Config

        environment = self._environment
        session = boto3.Session(
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment["AWS_DEFAULT_REGION"],
        )
        config = Config(retries={"total_max_attempts": 20, "mode": "standard"})
        # Faults are injected into these calls, too.
        client = make_client(session, "sagemaker", endpoint_url=environment["AWS_ENDPOINT_URL"], config=config)
        pages = client.get_paginator("list_training_jobs").paginate(NameContains=f"{name}-")
        return [job for page in pages for job in page["TrainingJobSummaries"]]

    def _set_faults(self, plan: Mapping[str, Any]) -> None:
        import urllib.request

        address = f"{self._environment['AWS_ENDPOINT_URL']}/_cloudtrain/weather"
        request = urllib.request.Request(address, data=json.dumps(plan).encode(), method="PUT")  # noqa: S310
        key = self._environment["AWS_ACCESS_KEY_ID"]
        request.add_header(
            "Authorization", f"AWS4-HMAC-SHA256 Credential={key}/20261122/us-west-2/sandbox/aws4_request"
        )
        urllib.request.urlopen(request).close()  # noqa: S310 (loopback)


def _report(results: list[RunResult], seconds: float, seed: int) -> str:
    ends = Counter(each.end for each in results)
    faults = [fault for each in results for fault in each.faults]
    kills = sum(each.kills for each in results)
    rows = [
        ("runs", f"{len(results)} ({', '.join(f'{count} {end}' for end, count in sorted(ends.items()))})"),
        ("clients killed", str(kills)),
        ("calls throttled, failed, cut, torn", ", ".join(f"{kind} {of['*']:.0%}" for kind, of in FAULT_PLAN.items())),
        ("duplicate jobs", str(sum(" jobs" in fault for fault in faults))),
        ("wrong final states", str(sum(": is [" in fault or "exit code" in fault for fault in faults))),
        ("logs with lost or repeated lines", str(sum("lines of" in fault for fault in faults))),
        ("tracebacks", str(sum("Traceback" in fault for fault in faults))),
        ("minutes", f"{seconds / 60:.0f}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    header = f"# Fault campaign\n\n`python benchmarks/campaign.py --runs {len(results)} --seed {seed}`\n\n"
    details = "".join(f"\n- {fault}" for fault in faults)
    return f"{header}| | |\n|---|---|\n{table}\n{details}\n"


if __name__ == "__main__":
    sys.exit(main())
