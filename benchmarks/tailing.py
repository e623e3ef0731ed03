"""Measure reading and following of SageMaker logs against a CloudWatch simulator with AWS's limits and faults.

    .venv/bin/python benchmarks/tailing.py [--lines 100000 1000000] [--runs 100] [--seconds 60] [--write FILE]

The first part reads one log of four hosts, and follows it while it is written. A fifth of the calls have faults:
throttling, status 500, lost and truncated responses, empty pages. Lines are numbered, so that lost and repeated lines
are counted. Memory is the peak of the reading process. The second part follows many runs at once, with one process and
with a process for each run. The server throttles calls above the limits. The clients are not coordinated: each backs
off by itself.
"""

from __future__ import annotations

import argparse
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

from measure import REPOSITORY, describe_machine, replace_marked

sys.path.insert(0, str(REPOSITORY / "tests"))

HOSTS = 4
_RUN = "bench-261120-101500-{:06x}"
_POLL_SECONDS = 0.1
_LINES_PER_SECOND = 60_000
"""Lines per second of all hosts of the followed log: slightly more than a client can read."""

LIMITS = {"GetLogEvents": 10.0, "DescribeLogStreams": 25.0, "DescribeTrainingJob": 10.0}
"""Calls per second of an account in the smaller regions. Source: "CloudWatch Logs quotas", Amazon CloudWatch Logs User
Guide, 2026. AWS does not publish the limit of DescribeTrainingJob; 10 is assumed."""

_PADDING = "loss 0.1234  lr 3.0e-04  812.4 samples/s  grad norm 0.97  data 0.001 s  step 0.121 s"


def serve(script: dict[str, Any]) -> None:
    """Serve jobs and logs; print the address, and statistics of the calls when standard input ends."""
    from support.cloudwatch_server import EVERY_FAULT, CloudWatch, summary
    from support.cloudwatch_server import serve as serving

    service = CloudWatch(EVERY_FAULT if script["faults"] else None, limits=script["limits"])
    began = time.time()
    for number in range(script["runs"]):
        name = _RUN.format(number)
        service.run(name, hosts=script["hosts"])
        for host in range(script["hosts"]):
            per_second = script["per_second"] if host == 0 or script["all_print"] else 0.0
            count = script["lines"] // script["hosts"] if script["all_print"] else script["lines"] if host == 0 else 3
            service.generate(f"{name}/algo-{host + 1}-1770000000", count, _numbered_line(began, per_second))
    with serving(service) as endpoint:
        print(endpoint, flush=True)
        for command in sys.stdin:
            if command.strip() == "end":
                for name in list(service.jobs):
                    service.run(name, "Completed", "Completed")
    rates = {operation: _most_in_a_second(times) for operation, times in service.times.items()}
    late = {
        operation: _refused_late(times, service.refused_at.get(operation, []))
        for operation, times in service.times.items()
    }
    print(json.dumps({**summary(service), "most": rates, "refused_late": late}))


def _numbered_line(began: float, per_second: float) -> Callable[[int], tuple[int, str, int]]:
    def event(index: int) -> tuple[int, str, int]:
        at = int((began + (index / per_second if per_second else -60)) * 1000)
        return at, f"{index} {_PADDING}", at

    return event


def _most_in_a_second(times: list[float]) -> int:
    most = begin = 0
    for end, moment in enumerate(times):
        while times[begin] <= moment - 1:
            begin += 1
        most = max(most, end - begin + 1)
    return most


def _refused_late(times: list[float], refused_at: list[float]) -> float:
    """Return the share of rejected calls in the second half of the time."""
    middle = (times[0] + times[-1]) / 2
    late = sum(moment > middle for moment in times)
    return sum(moment > middle for moment in refused_at) / max(1, late)


@contextlib.contextmanager
def server(**script: Any) -> Iterator[tuple[str, subprocess.Popen[str], dict[str, Any]]]:
    """Serve in a child process; yield its address, the process, and its statistics after the end."""
    argv = [sys.executable, __file__, "--serve", json.dumps(script)]
    server_stats: dict[str, Any] = {}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            sys.exit("the server has no pipes")
        endpoint = process.stdout.readline().strip()
        yield endpoint, process, server_stats
        process.stdin.close()
        server_stats |= json.loads(process.stdout.read())


class Checker:
    """Counts lines, and those of each host that are lost or repeated, without keeping any."""

    def __init__(self) -> None:
        self.lines = self.lost = self.repeated = 0
        self.latencies: list[float] = []
        self._next: dict[str, int] = {}

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


def read_long_log(way: str) -> None:
    """Read or follow the server's only run, and print counts."""
    from cloudtrain.backends.sagemaker.backend import SageMakerBackend
    from cloudtrain.settings.settings import Settings

    backend = SageMakerBackend(Settings(region="us-west-2"), poll_seconds=_POLL_SECONDS)
    checker = Checker()
    began = time.perf_counter()
    checker.check(backend.logs(_RUN.format(0), follow=way == "followed"))
    seconds = time.perf_counter() - began
    counts = {"lines": checker.lines, "lost": checker.lost, "repeated": checker.repeated}
    print(json.dumps({**counts, "seconds": seconds}))


def measure_long_log(way: str, lines: int) -> list[str]:
    """Return a row of the table."""
    followed = way == "followed"
    script = {"faults": True, "limits": {}, "runs": 1, "hosts": HOSTS, "lines": lines, "all_print": True}
    with server(**script, per_second=_LINES_PER_SECOND / HOSTS if followed else 0) as (
        endpoint,
        process,
        server_stats,
    ):
        environ = {**os.environ, "AWS_ENDPOINT_URL": endpoint}
        if followed and process.stdin is not None:
            threading.Timer(lines / _LINES_PER_SECOND, _send_end, (process,)).start()
        with tempfile.TemporaryFile("w+") as output:
            argv = [sys.executable, __file__, "--read", way]
            actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), 1)]
            child = os.posix_spawn(argv[0], argv, environ, file_actions=actions)
            _, status, usage = os.wait4(child, 0)
            output.seek(0)
            found = json.loads(output.read()) if status == 0 else sys.exit(f"{way} of {lines} lines failed")
    lost, repeated = lines - found["lines"] + found["repeated"], found["repeated"]
    injected = {**server_stats["injected"]}
    faults = sum(count for kind, count in injected.items() if kind not in ("empty", "short"))
    cells = [f"{way}, {lines:,} lines", f"{found['seconds']:.1f}", f"{lines / found['seconds']:,.0f}"]
    cells += [f"{usage.ru_maxrss * 1024 / 1e6:.0f} MB", f"{sum(server_stats['calls'].values())}"]
    return [*cells, f"{faults} and {injected.get('empty', 0)}", f"{lost}", f"{repeated}"]


def _send_end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.write("end\n")
        process.stdin.flush()


def follow_many(way: str, endpoint: str, runs: int, seconds: float, work: Path) -> dict[str, Any]:
    """Follow all runs for a while, and return counts and latencies of the lines."""
    import boto3
    from botocore.config import Config

    import cloudtrain.backends.sagemaker.logs  # noqa: F401 (once, before 100 processes are forked)
    from cloudtrain.aws.retry import client_retries

    config = Config(retries=client_retries(), max_pool_connections=runs)
    clients = [boto3.client(name, endpoint_url=endpoint, config=config) for name in ("logs", "sagemaker")]
    until = time.monotonic() + seconds
    if way == "one process":
        checkers = [Checker() for _ in range(runs)]
        threads = [
            threading.Thread(target=_follow, args=(clients, number, until, checker), daemon=True)
            for number, checker in enumerate(checkers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return _sum([_result(checker) for checker in checkers])
    folder = work / "results"
    folder.mkdir()
    children = [_fork(clients, number, until, folder) for number in range(runs)]
    for child in children:
        os.waitpid(child, 0)
    return _sum([json.loads(path.read_text()) for path in folder.iterdir()])


def _fork(clients: list[Any], number: int, until: float, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    checker = Checker()
    thread = threading.Thread(target=_follow, args=(clients, number, until, checker), daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    (folder / str(number)).write_text(json.dumps(_result(checker)))
    os._exit(0)


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
        return JobSnapshot(job["SecondaryStatus"], has_ended=job["TrainingJobStatus"] != "InProgress")

    outages = OutageTolerance(policy=FOLLOW_OUTAGES)
    while time.monotonic() < until:
        try:
            checker.check(JobLogs(logs).follow(name, ALL_LINES, look), timed=True)
        except UnreachableError as error:
            time.sleep(outages.failed(error))


def _result(checker: Checker) -> dict[str, Any]:
    counts = {"lines": checker.lines, "lost": checker.lost, "repeated": checker.repeated}
    return {**counts, "latencies": checker.latencies[:]}


def _sum(results: list[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for each in results:
        counts.update({name: each[name] for name in ("lines", "lost", "repeated")})
    return {**counts, "latencies": [latency for each in results for latency in each["latencies"]]}


def measure_many(way: str, runs: int, seconds: float) -> list[list[str]]:
    """Return the rows of one variant: a row for each operation."""
    script = {"faults": False, "limits": LIMITS, "runs": runs, "hosts": 2, "lines": 3600, "all_print": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        server(**script, per_second=1.0) as (endpoint, _, server_stats),
    ):
        argv = [sys.executable, __file__, "--follow", way, endpoint, str(runs), str(seconds), folder]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        found = json.loads(done.stdout)
    delays = sorted(found["latencies"])
    median, worst = statistics.median(delays), delays[int(len(delays) * 0.95)]
    rows = []
    for operation, limit in LIMITS.items():
        calls, refused = server_stats["calls"][operation], server_stats["throttled"].get(operation, 0)
        rate = f"{calls / seconds:.1f}"
        share = f"{100 * refused / calls:.1f} %, {100 * server_stats['refused_late'][operation]:.1f} %"
        row = [way, operation, f"{limit:.0f}", rate, str(server_stats["most"][operation]), share]
        rows.append([*row, f"{median:.0f} s, {worst:.0f} s", f"{found['lost']}, {found['repeated']}"])
    return rows


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


_LOG_HEADS = ["way", "seconds", "lines/s", "peak memory", "calls", "faults, empty pages", "lost", "repeated"]
_RUN_HEADS = [
    "followed by",
    "operation",
    "limit/s",
    "calls/s",
    "most in a second",
    "throttled (of all, of the second half)",
    "line shown after (median, 95 %)",
    "lost, repeated",
]


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long many runs are followed")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    for name in ("serve", "read"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--follow", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    account = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-west-2"}
    os.environ |= {**account, "AWS_EC2_METADATA_DISABLED": "true"}
    if options.serve:
        serve(json.loads(options.serve))
    elif options.read:
        read_long_log(options.read)
    elif options.follow:
        way, endpoint, runs, seconds, work = options.follow
        print(json.dumps(follow_many(way, endpoint, int(runs), float(seconds), Path(work))))
    else:
        text = _measure(options.lines, options.runs, options.seconds)
        print(text)
        if options.write is not None:
            replace_marked(options.write, text)


def _measure(sizes: list[int], runs: int, seconds: float) -> str:
    logs = [measure_long_log(way, lines) for way in ("read", "followed") for lines in sizes]
    ways = ("one process", "a process each")
    many = [row for way in ways for row in measure_many(way, runs, seconds)]
    about_logs = (
        f"One log of {HOSTS} hosts on {describe_machine()}, server included. Followed while it is written at "
        f"{_LINES_PER_SECOND:,} lines a second; waits are {5 / _POLL_SECONDS:.0f} times shorter than on AWS."
    )
    about_runs = (
        f"{runs} runs followed for {seconds:.0f} s, from their start on, with the waits of AWS. Each has two hosts, of "
        "which one prints a line a second."
    )
    return "\n".join([*_table(_LOG_HEADS, logs), "", about_logs, "", *_table(_RUN_HEADS, many), "", about_runs])


if __name__ == "__main__":
    main()
