"""Fault campaign: many runs are submitted, followed and stopped while calls fail and clients are killed.

    .venv/bin/python benchmarks/campaign.py --runs 200 --write benchmarks/results/campaign.md

Every run is a training job of the sandbox that really runs. Random calls of the clients are throttled, fail with status
500, lose their response, or get half of it. Clients are killed by SIGKILL at random moments and started again, as a
user would do. At the end each run must have one job, the expected final state, each line of its log once and in order,
and no traceback. Any difference is printed, and the exit code is then 1.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from measure import BIN, Benchmark, Session, markdown_table
from support.sandboxes import Served, serve

COMMAND = BIN / "cloudtrain"
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
    """One run and its result.

    Attributes:
        end: How the run is meant to end.
        lines: Lines that its script prints.
        exit_code: Of the last client that followed it.
        errors: What that client printed as messages, with the log.
        kills: Number of killed clients.
        faults: Differences from the expected result, a sentence each.
    """

    name: str
    end: str
    lines: int
    exit_code: int = -1
    errors: str = ""
    kills: int = 0
    faults: list[str] = field(default_factory=list)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="none",
    goal="one job, the expected state and each log line once for every run, and no traceback",
    mechanism="the sandbox had the plan of faults, and at least one client of the campaign was killed",
    rounds=0,
    options={
        "runs": (200, "runs of the campaign"),
        "at-once": (4, "runs at once"),
        "seed": (0, "of all randomness"),
    },
)


def measure(session: Session) -> list[str]:
    """Run the campaign; return its table, and record the faults."""
    options = session.options
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "sandbox") as sandbox:
        sandbox.set_faults(**FAULT_PLAN, seed=options.seed)
        campaign = Campaign(Path(folder), sandbox, options.seed)
        with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
            results = list(pool.map(campaign.run, range(options.runs)))
        sandbox.set_faults()
        for result in results:
            campaign.compare(result)
    session.faults += [fault for each in results for fault in each.faults]
    kills = sum(each.kills for each in results)
    session.require(kills > 0, "no client was killed")
    ends = Counter(each.end for each in results)
    counts = {
        "runs": f"{len(results)} ({', '.join(f'{count} {end}' for end, count in sorted(ends.items()))})",
        "clients killed": kills,
        "calls throttled, failed, cut, torn": ", ".join(
            f"{kind} {of['*']:.0%}" for kind, of in FAULT_PLAN.items()
        ),
        "duplicate jobs": sum(" jobs" in fault for fault in session.faults),
        "wrong final states": sum(
            ": is [" in fault or "exit code" in fault for fault in session.faults
        ),
        "logs with lost or repeated lines": sum("lines of" in fault for fault in session.faults),
        "tracebacks": sum("Traceback" in fault for fault in session.faults),
        "minutes": f"{(time.monotonic() - started) / 60:.0f}",
    }
    return markdown_table(("", ""), counts.items())


class Campaign:
    """Runs of one sandbox."""

    def __init__(self, folder: Path, sandbox: Served, seed: int) -> None:
        self._folder, self._sandbox, self._seed = folder, sandbox, seed
        self._environment = {
            **os.environ,
            **sandbox.environment,
            "CLOUDTRAIN_TRANSPORT": "boto3",
            "TERM": "dumb",
        }

    def run(self, number: int) -> RunResult:
        """Execute one run; record errors in its result."""
        rng = random.Random(f"{self._seed}:{number}")  # noqa: S311 (no secret)
        result = RunResult(f"campaign-{number}", rng.choice(list(ENDS)), rng.randrange(50, 200))
        try:
            job = self._write(result)
            follow = ["submit", str(job), "--skip-check", "--follow", "--json"]
            for _ in range(rng.choice((0, 0, 1, 2))):
                result.kills += self._kill(follow, rng.random() * 8)
            self._finish(follow, job.parent / "release", rng, result)
        except Exception as error:  # noqa: BLE001 (recorded as a fault)
            result.faults.append(f"{result.name}: {type(error).__name__}: {error}")
        return result

    def compare(self, result: RunResult) -> None:
        """Compare one run with the expected result."""
        code, status = ENDS[result.end]
        pages = self._sandbox.client("sagemaker").get_paginator("list_training_jobs")
        found = pages.paginate(NameContains=f"{result.name}-").search(
            "TrainingJobSummaries[].TrainingJobStatus"
        )
        states, faults = list(found), []
        if len(states) != 1:
            faults.append(f"{len(states)} jobs")
        if states != [status]:
            faults.append(f"is {states}, not {status}")
        if result.exit_code != code:
            faults.append(f"exit code {result.exit_code}, not {code}: {result.errors[-2000:]}")
        if "Traceback" in result.errors:
            faults.append(result.errors[-2000:])
        seen = [
            int(match[1])
            for line in result.errors.splitlines()
            if (match := _LINE.search(line.rstrip()))
        ]
        if seen != list(range(len(seen) if result.end == "stop" else result.lines)):
            faults.append(f"{len(seen)} lines of {result.lines}, or in another order")
        result.faults += [f"{result.name}: {fault}" for fault in faults]

    def _write(self, result: RunResult) -> Path:
        folder = self._folder / result.name
        folder.mkdir()
        (folder / "talk.py").write_text(SCRIPT)
        values = {
            "name": result.name,
            "end": result.end,
            "lines": result.lines,
            "release": folder / "release",
        }
        (folder / "job.yaml").write_text(JOB.format(**values))
        return folder / "job.yaml"

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(COMMAND), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
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
    ) -> None:
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
            if client.stdout is not None:
                client.stdout.read()
            result.exit_code = client.wait(300)
            reader.join()
            result.errors = "".join(errors)
            if client.returncode != _REFUSED or "Traceback" in result.errors:
                break

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


if __name__ == "__main__":
    BENCHMARK.main(measure)
