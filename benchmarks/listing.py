"""Measure `cloudtrain list` with many runs: the entire process, from start to end.

    .venv/bin/python benchmarks/listing.py [--jobs 10000] [--turns 5] [--milliseconds 0] [--write FILE]

A server on loopback implements ListTrainingJobs and Search by their API reference. `--milliseconds` delays each
response, as a distant server does. The local runs are folders in the local backend's format. Commands alternate. For
comparison, boto3 reads one page, and all pages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measure import BIN, Command, describe_machine, measure, replace_marked, table

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
    wanted = [(f["Name"].removeprefix("Tags."), f["Value"]) for f in parameters["SearchExpression"]["Filters"]]
    found = [job for job in jobs if all({"Key": key, "Value": value} in job["Tags"] for key, value in wanted)]
    page, more = _page(found, parameters)
    return {"Results": [{"TrainingJob": job} for job in page], **more}


def _page(found: list[dict[str, Any]], parameters: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    start, size = int(parameters.get("NextToken", 0)), parameters.get("MaxResults", 10)
    return found[start : start + size], ({"NextToken": str(start + size)} if start + size < len(found) else {})


def serve(jobs: list[dict[str, Any]], seconds: float, port: Connection) -> None:
    """Serve the account until the process ends; send the port through a connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # With Nagle's algorithm, each response waits 40 ms for a delayed ACK between headers and body.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]
            parameters = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            body = json.dumps({"ListTrainingJobs": list_jobs, "Search": search}[operation](jobs, parameters)).encode()
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
        state = {"state": STATES[job["TrainingJobStatus"]], "reason": "", "started": moment, "ended": moment}
        (folder / "state.json").write_text(json.dumps({**state, "supervisor": 1, "artifacts": {}}))
        (folder / "request.json").write_text(json.dumps({"Tags": job["Tags"]}))
        step = {"event": "step", "epoch": 0, "loss": 0.5, "samples_per_second": 9.0}
        (folder / "events.jsonl").write_text("".join(json.dumps({**step, "step": each}) + "\n" for each in range(100)))


def commands(cwd: Path) -> list[Command]:
    """Return the measured commands."""

    def cloudtrain(name: str, *arguments: str, goal: str = "") -> Command:
        return Command(name, [str(BIN / "cloudtrain"), "list", *arguments], cwd, goal)

    def python(name: str, text: str) -> Command:
        return Command(name, [sys.executable, "-c", text], cwd)

    return [
        python("boto3, one page", ONE_PAGE),
        cloudtrain("`list --sagemaker`", "--sagemaker", goal="under 1 s"),
        cloudtrain("`list --sagemaker -n 100`", "--sagemaker", "-n", "100", goal="under 1 s"),
        cloudtrain("`list --sagemaker --name digits`", "--sagemaker", "--name", "digits", goal="under 1 s"),
        cloudtrain("`list --sagemaker --state FAILED`", "--sagemaker", "--state", "FAILED", goal="under 1 s"),
        cloudtrain("`list --sagemaker --tag team=vision`", "--sagemaker", "--tag", "team=vision", goal="under 1 s"),
        cloudtrain("`list --sagemaker --state RUNNING` (none: all pages)", "--sagemaker", "--state", "RUNNING"),
        python("boto3, all pages", ALL_PAGES),
        cloudtrain("`list --local`", "--local", goal="under 1 s"),
        cloudtrain("`list --local --state FAILED`", "--local", "--state", "FAILED", goal="under 1 s"),
        cloudtrain("`list --local --tag team=vision`", "--local", "--tag", "team=vision", goal="under 1 s"),
        cloudtrain("`list --local --state RUNNING` (none: all runs)", "--local", "--state", "RUNNING"),
    ]


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=5, help="counted turns of each command")
    parser.add_argument("--milliseconds", type=float, default=0, help="delay of each response of the account")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    options = parser.parse_args()
    jobs = make_jobs(options.jobs)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(jobs, options.milliseconds / 1000, theirs), daemon=True)
    server.start()
    failed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_runs(home, jobs)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CLOUDTRAIN_"))}
        environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "CLOUDTRAIN_HOME": str(home),
            "HOME": str(home),
        }
        found = commands(home)
        seconds = measure(found, options.turns, environ, failed)
    server.terminate()
    wait = f", each response after {options.milliseconds:g} ms" if options.milliseconds else ""
    note = (
        f"{options.jobs:,} jobs of an account on loopback{wait}, and as many runs on this machine. Medians of "
        f"{options.turns} alternating turns on {describe_machine()}; entire processes."
    )
    text = "\n".join([*table(found, seconds, found[0].name), "", note])
    print(text)
    if options.write is not None:
        replace_marked(options.write, text)


if __name__ == "__main__":
    main()
