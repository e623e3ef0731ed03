"""Measure `cloudtrain list` with many runs: the entire process, from start to end.

    .venv/bin/python benchmarks/listing.py [--jobs 10000] [--rounds 5] [--milliseconds 0] [--write FILE]

A server on loopback implements ListTrainingJobs and Search by their API reference. `--milliseconds` delays each
response, as a distant server does. The local runs are folders in the local backend's format. Commands alternate. For
comparison, boto3 reads one page, and all pages.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measure import BIN, Benchmark, Peer, Session, alternate, clean_environ, table

REGION = "us-west-2"
STATUSES = ("Completed", "Completed", "Failed", "Stopped")
STATES = {"Completed": "SUCCEEDED", "Failed": "FAILED", "Stopped": "STOPPED"}
PAGE = """
import boto3
client = boto3.client("sagemaker")
pages = client.get_paginator("list_training_jobs").paginate(
    SortBy="CreationTime", SortOrder="Descending", PaginationConfig={"PageSize": 100}
)
"""
ONE_PAGE = PAGE + 'print(len(next(iter(pages))["TrainingJobSummaries"]))'
ALL_PAGES = PAGE + 'print(sum(len(page["TrainingJobSummaries"]) for page in pages))'
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="boto3, which reads one page of 100 jobs, and all pages",
    goal="under 1 s for each list that finds its jobs near the start",
    mechanism="a list that finds its jobs near the start made at most two calls to the account, a local list none",
    rounds=5,
    options={
        "jobs": (10_000, "jobs of the account, and local runs"),
        "milliseconds": (0.0, "delay of each response of the account"),
    },
    packages=("boto3",),
)


def make_jobs(count: int) -> list[dict[str, Any]]:
    """Return jobs, the newest first, one per hour."""
    now = datetime.now(UTC)
    jobs = []
    for index in range(count):
        created = now - timedelta(hours=index)
        name = f"{'gpt' if index % 10 else 'digits'}-{created:%y%m%d-%H%M%S}-{index:06x}"
        status = STATUSES[index % len(STATUSES)]
        jobs.append(
            {
                "TrainingJobName": name,
                "TrainingJobArn": f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{name}",
                "CreationTime": created.timestamp(),
                "TrainingEndTime": created.timestamp() + 1800,
                "LastModifiedTime": created.timestamp() + 1800,
                "TrainingJobStatus": status,
                "SecondaryStatus": status,
                "Tags": [{"Key": "team", "Value": "vision" if index % 100 == 0 else "language"}],
            }
        )
    return jobs


def list_jobs(jobs: list[dict[str, Any]], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a response of ListTrainingJobs. As in AWS, the filter by status applies within a page."""
    name, after = parameters.get("NameContains", ""), parameters.get("CreationTimeAfter", 0)
    found = (
        jobs
        if not name and not after
        else [j for j in jobs if name in j["TrainingJobName"] and j["CreationTime"] > after]
    )
    page, more = _page(found, parameters)
    status = parameters.get("StatusEquals")
    hidden = {"Tags"}
    summaries = [
        {key: value for key, value in job.items() if key not in hidden}
        for job in page
        if status in (None, job["TrainingJobStatus"])
    ]
    return {"TrainingJobSummaries": summaries, **more}


def search(jobs: list[dict[str, Any]], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a response of Search by tags."""
    wanted = [
        (f["Name"].removeprefix("Tags."), f["Value"])
        for f in parameters["SearchExpression"]["Filters"]
    ]
    found = [
        job
        for job in jobs
        if all({"Key": key, "Value": value} in job["Tags"] for key, value in wanted)
    ]
    page, more = _page(found, parameters)
    return {"Results": [{"TrainingJob": job} for job in page], **more}


def _page(
    found: list[dict[str, Any]], parameters: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    start, size = int(parameters.get("NextToken", 0)), parameters.get("MaxResults", 10)
    return found[start : start + size], (
        {"NextToken": str(start + size)} if start + size < len(found) else {}
    )


def serve(jobs: list[dict[str, Any]], seconds: float, port: Connection, calls: Any) -> None:
    """Serve the account until the process ends; send the port through a connection, and count the calls."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # With Nagle's algorithm, each response waits 40 ms for a delayed ACK between headers and body.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]
            parameters = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            with calls.get_lock():
                calls.value += 1
            body = json.dumps(
                {"ListTrainingJobs": list_jobs, "Search": search}[operation](jobs, parameters)
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    server.serve_forever()


def make_runs(home: Path, jobs: list[dict[str, Any]]) -> None:
    """Write a run folder of the local backend for each job."""
    for job in jobs:
        folder = home / "runs" / job["TrainingJobName"]
        folder.mkdir(parents=True)
        moment = datetime.fromtimestamp(job["CreationTime"], UTC).isoformat()
        state = {
            "state": STATES[job["TrainingJobStatus"]],
            "reason": "",
            "started": moment,
            "ended": moment,
        }
        (folder / "state.json").write_text(json.dumps({**state, "supervisor": 1, "artifacts": {}}))
        (folder / "request.json").write_text(json.dumps({"Tags": job["Tags"]}))
        step = {"event": "step", "epoch": 0, "loss": 0.5, "samples_per_second": 9.0}
        (folder / "events.jsonl").write_text(
            "".join(json.dumps({**step, "step": each}) + "\n" for each in range(100))
        )


def peers(session: Session, cwd: Path, environ: dict[str, str], calls: Any) -> list[Peer]:
    """Return the measured commands."""
    none, few, many = range(1), range(1, 3), range(3, sys.maxsize)

    def peer(name: str, argv: list[str], goal: str, *, pages: range) -> Peer:
        def run() -> float:
            calls.value = 0
            seconds = session.run_command(name, argv, cwd, environ)
            session.require(calls.value in pages, f"{name} has made {calls.value} calls")
            return seconds

        return Peer(name, run, goal)

    def python(name: str, text: str, pages: range) -> Peer:
        return peer(name, [sys.executable, "-c", text], "", pages=pages)

    def listing(*arguments: str, pages: range, note: str = "") -> Peer:
        name = f"`list {' '.join(arguments)}`{note}"
        return peer(
            name,
            [str(BIN / "cloudtrain"), "list", *arguments],
            "" if note else "under 1 s",
            pages=pages,
        )

    return [
        python("boto3, one page", ONE_PAGE, few),
        listing("--sagemaker", pages=few),
        listing("--sagemaker", "-n", "100", pages=few),
        listing("--sagemaker", "--name", "digits", pages=few),
        listing("--sagemaker", "--state", "FAILED", pages=few),
        listing("--sagemaker", "--tag", "team=vision", pages=few),
        listing("--sagemaker", "--state", "RUNNING", pages=many, note=" (none: all pages)"),
        python("boto3, all pages", ALL_PAGES, many),
        listing("--local", pages=none),
        listing("--local", "--state", "FAILED", pages=none),
        listing("--local", "--tag", "team=vision", pages=none),
        listing("--local", "--state", "RUNNING", pages=none, note=" (none: all runs)"),
    ]


def measure(session: Session) -> list[str]:
    """Return the table."""
    options = session.options
    jobs = make_jobs(options.jobs)
    ours, theirs = multiprocessing.Pipe()
    calls = multiprocessing.Value("i", 0)
    arguments = (jobs, options.milliseconds / 1000, theirs, calls)
    server = multiprocessing.Process(target=serve, args=arguments, daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), jobs)
        environ = clean_environ(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{ours.recv()}", CLOUDTRAIN_HOME=folder, HOME=folder
        )
        found = alternate(peers(session, Path(folder), environ, calls), session.rounds)
    server.terminate()
    wait = f", each response after {options.milliseconds:g} ms" if options.milliseconds else ""
    about = f"{options.jobs:,} jobs of an account on loopback{wait}, and as many runs on this machine; entire processes."
    return [*table("command", found, base=found[0].name), "", about]


if __name__ == "__main__":
    BENCHMARK.main(measure)
