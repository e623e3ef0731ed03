"""Measure reading and following of SageMaker logs against a CloudWatch simulator with AWS's limits and faults.

    .venv/bin/python benchmarks/tailing.py [--lines 100000 1000000] [--runs 100] [--seconds 120] [--write FILE]

The first part reads one log of four hosts, and follows it while it is written. A fifth of the calls have faults:
throttling, status 500, lost and truncated responses, empty pages. Lines are numbered, so that lost and repeated lines
are counted. Memory is the peak of the reading process. The second part follows many runs at once, with one process and
with a process for each run. The server throttles calls above the limits. The clients are not coordinated: each backs
off by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from measure import Benchmark, Session, clean_environ, markdown_table, run_child

HOSTS = 4
_RUN = "bench-261120-101500-{:06x}"
_POLL_SECONDS = 0.1
_LINES_PER_SECOND = 60_000
"""Lines per second of all hosts of the followed log: slightly more than a client can read."""

LIMITS = {"GetLogEvents": 10.0, "DescribeLogStreams": 25.0, "DescribeTrainingJob": 10.0}
"""Calls per second of an account in the smaller regions. Source: "CloudWatch Logs quotas", Amazon CloudWatch Logs User
Guide, 2026. AWS does not publish the limit of DescribeTrainingJob; 10 is assumed."""

_PADDING = "loss 0.1234  lr 3.0e-04  812.4 samples/s  grad norm 0.97  data 0.001 s  step 0.121 s"


def serve(**script: Any) -> dict[str, Any]:
    """Serve jobs and logs; print the address, and return statistics of the calls when standard input ends."""
    from support.cloudwatch_server import EVERY_FAULT, CloudWatch, summary
    from support.cloudwatch_server import serve as serving

    service = CloudWatch(EVERY_FAULT if script["faults"] else None, limits=script["limits"])
    began = time.time()
    for number in range(script["runs"]):
        name = _RUN.format(number)
        service.run(name, hosts=script["hosts"])
        for host in range(script["hosts"]):
            per_second = script["per_second"] if host == 0 or script["all_print"] else 0.0
            count = (
                script["lines"] // script["hosts"]
                if script["all_print"]
                else script["lines"]
                if host == 0
                else 3
            )
            service.generate(
                f"{name}/algo-{host + 1}-1770000000", count, _numbered_line(began, per_second)
            )
    with serving(service) as endpoint:
        print(endpoint, flush=True)
        for command in sys.stdin:
            if command.strip() == "end":
                for name in list(service.jobs):
                    service.run(name, "Completed", "Completed")
    return summary(service)


def _numbered_line(began: float, per_second: float) -> Callable[[int], tuple[int, str, int]]:
    def event(index: int) -> tuple[int, str, int]:
        at = int((began + (index / per_second if per_second else -60)) * 1000)
        return at, f"{index} {_PADDING}", at

    return event


@contextlib.contextmanager
def server(**script: Any) -> Iterator[tuple[str, subprocess.Popen[str], dict[str, Any]]]:
    """Serve in a child process; yield its address, the process, and its statistics after the end."""
    argv = BENCHMARK.child(serve, **script)
    statistics_: dict[str, Any] = {}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None  # noqa: S101 (both are pipes)
        assert process.stdout is not None  # noqa: S101
        yield process.stdout.readline().strip(), process, statistics_
        process.stdin.close()
        statistics_ |= json.loads(process.stdout.read())


class Checker:
    """Counts lines, and those of each host that are lost or repeated, without keeping any."""

    def __init__(self) -> None:
        self.lines = self.lost = self.repeated = 0
        self.latencies: list[float] = []
        self._next: dict[str, int] = {}

    def counts(self) -> dict[str, int]:
        """Return the numbers of lines so far."""
        return {"lines": self.lines, "lost": self.lost, "repeated": self.repeated}

    def check(self, lines: Iterable[Any], *, timed: bool = False) -> None:
        """Read lines until the end."""
        for line in lines:
            number, expected = int(line.text.partition(" ")[0]), self._next.get(line.host, 0)
            self.lines += 1
            self.lost += max(0, number - expected)
            self.repeated += number < expected
            self._next[line.host] = max(number + 1, expected)
            if timed and line.host == "algo-1" and number > 0:
                self.latencies.append(time.time() - line.time)


def read_long_log(way: str) -> dict[str, float]:
    """Read or follow the server's only run, and return counts and seconds."""
    from cloudtrain.backends.sagemaker.backend import SageMakerBackend
    from cloudtrain.settings.settings import Settings

    backend = SageMakerBackend(Settings(region="us-west-2"), poll_seconds=_POLL_SECONDS)
    checker = Checker()
    began = time.perf_counter()
    checker.check(backend.logs(_RUN.format(0), follow=way == "followed"))
    return {**checker.counts(), "seconds": time.perf_counter() - began}


def measure_long_log(session: Session, way: str, lines: int) -> list[str]:
    """Return a row of the table."""
    per_second = _LINES_PER_SECOND / HOSTS if way == "followed" else 0
    script = {
        "faults": True,
        "limits": {},
        "runs": 1,
        "hosts": HOSTS,
        "lines": lines,
        "all_print": True,
    }
    with (
        server(**script, per_second=per_second) as (endpoint, process, served),
        tempfile.TemporaryDirectory() as folder,
    ):
        if way == "followed":
            threading.Timer(lines / _LINES_PER_SECOND, _send_end, (process,)).start()
        child = run_child(
            BENCHMARK.child(read_long_log, way=way),
            clean_environ(AWS_ENDPOINT_URL=endpoint),
            Path(folder),
        )
        found = json.loads(child.output)
    injected = served["injected"]
    faults = sum(count for kind, count in injected.items() if kind not in ("empty", "short"))
    session.require(any(served["faults"].values()), "the server had no plan of faults")
    lost, repeated = lines - found["lines"] + found["repeated"], found["repeated"]
    if lost or repeated:
        session.faults.append(f"{way}, {lines:,} lines: {lost} lost, {repeated} repeated")
    cells = [
        f"{way}, {lines:,} lines",
        f"{found['seconds']:.1f}",
        f"{lines / found['seconds']:,.0f}",
    ]
    cells += [f"{child.peak_bytes / 1e6:.0f} MB", f"{sum(served['calls'].values())}"]
    return [*cells, f"{faults} and {injected.get('empty', 0)}", f"{lost}", f"{repeated}"]


def _send_end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.write("end\n")
        process.stdin.flush()


def follow_many(way: str, endpoint: str, runs: int, seconds: float) -> dict[str, Any]:
    """Follow all runs for a while, and return counts and latencies of the lines."""
    import boto3
    from botocore.config import Config

    import cloudtrain.backends.sagemaker.logs  # noqa: F401 (once, before 100 processes are forked)
    from cloudtrain.aws.retry import client_retries

    config = Config(retries=client_retries(), max_pool_connections=runs)
    clients = [
        boto3.client(name, endpoint_url=endpoint, config=config) for name in ("logs", "sagemaker")
    ]
    until = time.monotonic() + seconds

    def follow(numbers: Iterable[int]) -> dict[str, Any]:
        checkers = {number: Checker() for number in numbers}
        threads = [
            threading.Thread(target=_follow, args=(clients, number, until, checker), daemon=True)
            for number, checker in checkers.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return _sum(
            {**checker.counts(), "latencies": checker.latencies[:]} for checker in checkers.values()
        )

    if way == "one process":
        return follow(range(runs))
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for number in range(runs):
            child = os.fork()
            if child == 0:
                Path(folder, str(number)).write_text(json.dumps(follow([number])))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return _sum(json.loads(path.read_text()) for path in Path(folder).iterdir())


def _sum(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    latencies: list[float] = []
    for each in results:
        latencies += each.pop("latencies")
        counts.update(each)
    return {**counts, "latencies": latencies}


def _follow(clients: list[Any], number: int, until: float, checker: Checker) -> None:
    """Follow one run as `cloudtrain follow` does, with its retries of outages."""
    from cloudtrain.aws.errors import aws_errors
    from cloudtrain.aws.retry import OutageTolerance
    from cloudtrain.backends.sagemaker.log_tail import JobSnapshot
    from cloudtrain.backends.sagemaker.logs import JobLogs
    from cloudtrain.console.follow import FOLLOW_OUTAGES
    from cloudtrain.errors import UnreachableError
    from cloudtrain.runs.log_lines import ALL_LINES

    logs, sagemaker = clients
    name = _RUN.format(number)

    def look() -> JobSnapshot:
        with aws_errors("describe the training job"):
            job = sagemaker.describe_training_job(TrainingJobName=name)
        return JobSnapshot(
            job["SecondaryStatus"], has_ended=job["TrainingJobStatus"] != "InProgress"
        )

    outages = OutageTolerance(policy=FOLLOW_OUTAGES)
    while time.monotonic() < until:
        try:
            checker.check(JobLogs(logs).follow(name, ALL_LINES, look), timed=True)
        except UnreachableError as error:
            time.sleep(outages.failed(error))


def measure_many(session: Session, way: str, runs: int, seconds: float) -> list[list[str]]:
    """Return the rows of one variant: a row for each operation."""
    script = {
        "faults": False,
        "limits": LIMITS,
        "runs": runs,
        "hosts": 2,
        "lines": 3600,
        "all_print": False,
    }
    with (
        server(**script, per_second=1.0) as (endpoint, _, served),
        tempfile.TemporaryDirectory() as folder,
    ):
        argv = BENCHMARK.child(follow_many, way=way, endpoint=endpoint, runs=runs, seconds=seconds)
        found = json.loads(run_child(argv, clean_environ(), Path(folder)).output)
    session.require(sum(served["calls"].values()) > 0, "no run was followed")
    if found["lost"] or found["repeated"]:
        session.faults.append(
            f"{runs} runs, {way}: {found['lost']} lines lost, {found['repeated']} repeated"
        )
    delays = sorted(found["latencies"])
    median, worst = statistics.median(delays), delays[int(len(delays) * 0.95)]
    rows = []
    for operation, limit in LIMITS.items():
        calls, refused = served["calls"][operation], served["throttled"].get(operation, 0)
        row = [
            way,
            operation,
            f"{limit:.0f}",
            f"{calls / seconds:.1f}",
            f"{100 * refused / calls:.1f} %",
        ]
        rows.append(
            [*row, f"{median:.0f} s, {worst:.0f} s", f"{found['lost']}, {found['repeated']}"]
        )
    return rows


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="none; one process for all runs with a process for each",
    goal="no line lost or repeated, and memory that does not grow with the log",
    mechanism="the server had a plan of faults for each log, and got calls for the followed runs",
    rounds=0,
    options={
        "lines": ((100_000, 1_000_000), "lengths of the log that is read and followed"),
        "runs": (100, "runs that are followed at once"),
        "seconds": (120.0, "how long they are followed"),
    },
    packages=("boto3",),
    children=(serve, read_long_log, follow_many),
)
_LOG_HEADINGS = (
    "way",
    "seconds",
    "lines/s",
    "peak memory",
    "calls",
    "faults, empty pages",
    "lost",
    "repeated",
)
_RUN_HEADINGS = (
    "followed by",
    "operation",
    "limit/s",
    "calls/s",
    "throttled",
    "line shown after (median, 95 %)",
    "lost, repeated",
)


def measure(session: Session) -> list[str]:
    """Return both tables."""
    options = session.options
    logs = [
        measure_long_log(session, way, lines)
        for way in ("read", "followed")
        for lines in options.lines
    ]
    ways = ("one process", "a process each")
    many = [
        row for way in ways for row in measure_many(session, way, options.runs, options.seconds)
    ]
    about_logs = (
        f"One log of {HOSTS} hosts, server on the same machine. Followed while it is written at {_LINES_PER_SECOND:,} "
        f"lines a second; waits are {5 / _POLL_SECONDS:.0f} times shorter than on AWS."
    )
    about_runs = (
        f"{options.runs} runs followed for {options.seconds:.0f} s, from their start on, with the waits of AWS. Each "
        "has two hosts, of which one prints a line a second."
    )
    tables = [*markdown_table(_LOG_HEADINGS, logs), "", about_logs, ""]
    return [*tables, *markdown_table(_RUN_HEADINGS, many), "", about_runs]


if __name__ == "__main__":
    BENCHMARK.main(measure)
