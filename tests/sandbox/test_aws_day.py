"""`make aws-day` against the sandbox: a whole day, planted differences, Ctrl-C, budget, dry run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aws_day.redaction import Redactor
from support.aws_proxies import serve_proxy
from support.jobs import REPOSITORY, until
from support.sandboxes import Served, serve

pytestmark = [pytest.mark.processes, pytest.mark.aws]

GRACE = 20
"""Long beside the pauses of a busy machine, in which a container prints nothing."""
TIMES = {
    "poll": 0.5,
    "work": 4,
    "count": 8,
    "limit": 60,
    "capacity": 240,
    "grace": GRACE,
    "grace_tolerance": 10,
    "end": 120,
}
"""Waiting times for the sandbox. Nothing else differs from a day in an account."""
CAPACITY_SECONDS = 2
"""Each start but a warm one waits so long, so that a warm one is faster."""


@dataclass(frozen=True)
class Done:
    """A day that has ended."""

    code: int
    out: str
    result: dict[str, Any]
    text: str

    def keys(self, verdict: str) -> set[str]:
        """Return the assumptions with a verdict."""
        return {each["key"] for each in self.result["answers"] if each["verdict"] == verdict}

    def observed(self, key: str) -> Any:
        """Return what was observed."""
        (found,) = [each for each in self.result["answers"] if each["key"] == key]
        return found["observed"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("aws-day"), "--grace", str(GRACE)) as served:
        served.set_faults(capacity_after_seconds=CAPACITY_SECONDS)
        yield served


def command_of(served: Served, folder: Path, *words: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    times = folder / "times.json"
    times.write_text(json.dumps(TIMES))
    given = (
        "--role",
        served.info["role"],
        "--bucket",
        served.info["bucket"],
        "--times",
        str(times),
    )
    return [sys.executable, "-m", "aws_day", *given, "--out", str(folder / "out"), *words]


def environ_of(served: Served, **more: str) -> dict[str, str]:
    path = f"{REPOSITORY / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, **served.environment, "PYTHONPATH": path, **more}


def run_day(
    served: Served, folder: Path, *words: str, endpoint: str = "", budget: str = "10"
) -> Done:
    more = {"AWS_ENDPOINT_URL": endpoint} if endpoint else {}
    done = subprocess.run(
        command_of(served, folder, "--budget", budget, *words),
        env=environ_of(served, **more),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    path = folder / "out" / "aws-day.json"
    assert path.exists(), done.stdout + done.stderr
    text = path.read_text()
    return Done(done.returncode, done.stdout + done.stderr, json.loads(text), text)


def jobs_of(served: Served, result: str) -> list[dict[str, Any]]:
    """Return the jobs of a day, by a text that its output begins with."""
    day = result.partition("day ")[2].partition(":")[0]
    found = served.client("sagemaker").list_training_jobs(NameContains=day, MaxResults=100)
    return list(found["TrainingJobSummaries"])


def test_a_whole_day_holds_and_leaves_nothing(quick: Served, tmp_path: Path) -> None:
    s3, bucket = quick.client("s3"), quick.info["bucket"]
    others = ["cloudtrain/other", "cloudtrain/aws-day/another-day/kept", "aws-day"]
    for key in others:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    day = run_day(quick, tmp_path)
    assert day.code == 0, day.out
    assert day.keys("holds") == {each["key"] for each in day.result["answers"]}
    assert [each["outcome"] for each in day.result["trials"]] == ["run"] * 10
    assert day.result["service"] == "sandbox"

    keys = quick.keys("")
    assert set(others) <= set(keys)
    assert [key for key in keys if "/aws-day/aws-day-" in key] == []
    jobs = jobs_of(quick, day.out)
    assert len(jobs) == 12
    assert {job["TrainingJobStatus"] for job in jobs} <= {"Completed", "Failed", "Stopped"}
    assert {job.get("WarmPoolStatus", {}).get("Status") for job in jobs} <= {
        None, "Reused", "Terminated"
    }  # fmt: skip
    streams = quick.client("logs").describe_log_streams(
        logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix="aws-day-"
    )
    assert streams["logStreams"] == []

    costs = day.result["costs"]
    assert 0 < costs["committed_usd"] < costs["reserved_usd"] < costs["budget_usd"]
    known = (quick.info["role"], bucket, "123456789012", os.uname().nodename, str(Path.home()))
    assert [value for value in known if Redactor({value: "x"}).found_in(day.text)] == []
    assert "arn:aws" not in day.text


# ---------------------------------------------------------------- planted differences


def _of(operation: str, change: Callable[[Any], None]) -> Any:
    """Return a change of the responses of one operation."""

    def answer(called: str, request: Any, status: int, response: Any) -> tuple[int, Any]:
        if called == operation and status == 200:
            change(response)
        return status, response

    return answer


def _later_bill(job: Any) -> None:
    if "BillableTimeInSeconds" in job:
        job["BillableTimeInSeconds"] += 90


def _no_discount(job: Any) -> None:
    if "BillableTimeInSeconds" in job:
        job["BillableTimeInSeconds"] = job["TrainingTimeInSeconds"]


def _other_order(job: Any) -> None:
    names = {"Downloading": "Training", "Training": "Downloading"}
    for each in job["SecondaryStatusTransitions"]:
        each["Status"] = names.get(each["Status"], each["Status"])


def _completed(job: Any) -> None:
    if job["TrainingJobStatus"] == "Stopped":
        job["TrainingJobStatus"] = "Completed"


def _other_streams(answer: Any) -> None:
    for each in answer["logStreams"]:
        each["logStreamName"] += "-i0"


def _own_streams(operation: str, request: Any) -> Any:
    """Undo the change of the names, so that logs can be read and deleted."""
    name = request.get("logStreamName", "")
    return {**request, "logStreamName": name.removesuffix("-i0")} if name else request


def _other_volume(job: Any) -> None:
    job["ResourceConfig"]["VolumeSizeInGB"] += 1


def _no_exit_code(job: Any) -> None:
    if "FailureReason" in job:
        job["FailureReason"] = job["FailureReason"].partition(", exit code")[0]


def _takes_same_name(called: str, request: Any, status: int, response: Any) -> tuple[int, Any]:
    if called == "CreateTrainingJob" and "ResourceInUse" in str(response):
        return 200, {
            "TrainingJobArn": f"arn:aws:sagemaker:us-west-2:123456789012:training-job/{request['TrainingJobName']}"
        }
    return status, response


PLANTED = {
    "order": ("failure", _of("DescribeTrainingJob", _other_order), {
        "failure.statuses": ["Starting", "Pending", "Training", "Downloading", "Failed"],
    }),
    "exit code": ("failure", _of("DescribeTrainingJob", _no_exit_code), {
        "failure.reason": "AlgorithmError: rank 0 on algo-1 (local rank 0) ended with exit code 3",
    }),
    "completed": ("grace", _of("DescribeTrainingJob", _completed), {"stop.status": "Completed"}),
    "bill": ("complete", _of("DescribeTrainingJob", _later_bill), {"bill.seconds": 90, "bill.phases": None}),
    "streams": ("complete", _of("DescribeLogStreams", _other_streams), {"logs.streams": None}),
    "name": ("complete", _takes_same_name, {"submit.same_name": ""}),
    "metrics": ("complete", _of("DescribeTrainingJob", lambda job: job.pop("FinalMetricDataList", 0)), {
        "metrics.final": [],
    }),
    "volume": ("complete", _of("DescribeTrainingJob", _other_volume), {
        "request.described": ["ResourceConfig.VolumeSizeInGB: sent 30, returned 31"],
    }),
    "spot": ("spot", _of("DescribeTrainingJob", _no_discount), {"spot.billed": None}),
}  # fmt: skip
"""By its name: the trial that sees it, the change of the answers, and what differs, with what is observed where it is
known before.
"""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_reported_alone(quick: Served, tmp_path: Path, name: str) -> None:
    trial, change, expected = PLANTED[name]
    with serve_proxy(quick.port, change, _own_streams) as endpoint:
        day = run_day(quick, tmp_path, "--trials", trial, endpoint=endpoint)
    assert day.code == 1, day.out
    assert day.keys("differs") == set(expected), day.out
    for key, observed in expected.items():
        assert observed is None or day.observed(key) == observed
        assert f"differs: {key}: " in day.out
    assert [each["outcome"] for each in day.result["trials"]] == ["run"]


def test_a_shorter_grace_of_the_server_is_reported(tmp_path: Path) -> None:
    with serve(tmp_path / "own", "--grace", "1") as served:
        day = run_day(served, tmp_path, "--trials", "grace")
    assert day.code == 1, day.out
    assert day.keys("differs") == {"stop.grace"}
    assert 0 <= day.observed("stop.grace") < 3


def test_a_refusal_ends_its_trial_and_no_other(quick: Served, tmp_path: Path) -> None:
    def refuse(called: str, request: Any, status: int, response: Any) -> tuple[int, Any]:
        if called == "CreateTrainingJob" and "-two-" in request["TrainingJobName"]:
            return 400, {
                "__type": "ResourceLimitExceeded",
                "message": "planted: the limit is 0 instances",
            }
        return status, response

    def unsent(operation: str, request: Any) -> Any:
        is_refused = operation == "CreateTrainingJob" and "-two-" in request["TrainingJobName"]
        return {**request, "TrainingJobName": "not valid"} if is_refused else request

    with serve_proxy(quick.port, refuse, unsent) as endpoint:
        day = run_day(quick, tmp_path, "--trials", "failure,two instances", endpoint=endpoint)
    assert day.code == 1, day.out
    assert {each["name"]: each["outcome"] for each in day.result["trials"]} == {
        "failure": "run",
        "two instances": "failed",
    }
    assert day.keys("differs") == {"check.predicts"}
    assert day.observed("check.predicts") == ["two instances: refused, check: passed"]
    assert day.keys("no answer") == {"instances.sum", "instances.streams"}
    assert {"failure.status", "failure.reason", "failure.statuses"} <= day.keys("holds")


# ---------------------------------------------------------------- the hard stop, the budget, the dry run


@pytest.mark.parametrize(
    ("number", "trouble"),
    [(signal.SIGINT, ""), (signal.SIGTERM, "errors of AWS"), (signal.SIGHUP, "closed output")],
)
def test_an_interrupted_day_leaves_no_job_in_progress(
    quick: Served, tmp_path: Path, number: signal.Signals, trouble: str
) -> None:
    command = command_of(quick, tmp_path, "--budget", "10", "--trials", "limit,warm pool,grace")
    process = subprocess.Popen(
        command,
        env=environ_of(quick),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Background jobs of a shell ignore SIGINT, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        until(lambda: statuses_of(quick, first).count("Training") >= 2)
        if trouble == "errors of AWS":
            # More than botocore tries again.
            quick.set_faults(errors={"StopTrainingJob": 8, "ListTrainingJobs": 8})
        if trouble == "closed output":
            process.stdout.close()
        process.send_signal(number)
        process.send_signal(number)
        code = process.wait(300)
        out = "" if trouble == "closed output" else process.stdout.read()
    finally:
        process.kill()
        process.stdout.close()
        quick.set_faults(capacity_after_seconds=CAPACITY_SECONDS)
    # With its output closed, Python itself cannot flush it.
    assert code in ((120, 130) if trouble == "closed output" else (130,)), out
    jobs = jobs_of(quick, first)
    assert len(jobs) >= 2
    assert {job["TrainingJobStatus"] for job in jobs} <= {"Completed", "Failed", "Stopped"}
    assert not any(job.get("WarmPoolStatus", {}).get("Status") == "Available" for job in jobs)
    assert [key for key in quick.keys("") if "/aws-day/aws-day-" in key] == []
    result = json.loads((tmp_path / "out" / "aws-day.json").read_text())
    assert {each["reason"] for each in result["trials"] if each["outcome"] == "not run"} == {
        "the day was ended"
    }


def statuses_of(served: Served, first_line: str) -> list[str]:
    """Return the secondary statuses of the jobs of a day."""
    return [job["SecondaryStatus"] for job in jobs_of(served, first_line)]


def test_a_job_that_aws_does_not_list_yet_is_stopped(quick: Served, tmp_path: Path) -> None:
    def lists_nothing(called: str, request: Any, status: int, response: Any) -> tuple[int, Any]:
        return (
            (200, {"TrainingJobSummaries": []})
            if called == "ListTrainingJobs"
            else (status, response)
        )

    with serve_proxy(quick.port, lists_nothing) as endpoint:
        process = subprocess.Popen(
            command_of(quick, tmp_path, "--budget", "10", "--trials", "limit"),
            env=environ_of(quick, AWS_ENDPOINT_URL=endpoint),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            until(lambda: "Training" in statuses_of(quick, first))
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130, out
    assert [job["TrainingJobStatus"] for job in jobs_of(quick, first)] == ["Stopped"]


def test_a_trial_that_does_not_fit_the_budget_is_named(quick: Served, tmp_path: Path) -> None:
    day = run_day(quick, tmp_path, "--trials", "failure,gpu,toolkit", budget="0.15")
    assert day.code == 0, day.out
    outcomes = {each["name"]: (each["outcome"], each["reason"]) for each in day.result["trials"]}
    assert outcomes["failure"][0] == "run"
    # The reservation of the first trial has become its bill, so that the second one fits after it.
    assert outcomes["gpu"][0] == "not run"
    assert "its largest bill is 0.18 USD, and 0.15 of 0.15 USD are left" in outcomes["gpu"][1]
    assert "its largest bill is 5.88 USD" in outcomes["toolkit"][1]
    assert len(jobs_of(quick, day.out)) == 1
    assert day.keys("not run") >= {"gpu.accepted", "toolkit.sum"}
    assert "not run    gpu.accepted" in day.out


def test_a_trial_without_quota_is_not_run(quick: Served, tmp_path: Path) -> None:
    def no_gpus(called: str, request: Any, status: int, response: Any) -> tuple[int, Any]:
        if called in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas"):
            name = "ml.g4dn.xlarge for training job usage"
            return 200, {"Quotas": [{"QuotaName": name, "QuotaCode": "L-3F53BF0F", "Value": 0.0}]}
        return status, response

    with serve_proxy(quick.port, no_gpus) as endpoint:
        day = run_day(quick, tmp_path, "--trials", "gpu", endpoint=endpoint)
    assert day.code == 0, day.out
    (trial,) = day.result["trials"]
    assert trial["outcome"] == "not run"
    assert trial["reason"].startswith("quota: ml.g4dn.xlarge for training job usage: 0"), trial
    assert jobs_of(quick, day.out) == []
    assert day.result["costs"]["committed_usd"] == 0
    assert day.keys("not run") == {each["key"] for each in day.result["answers"]}


def test_a_dry_run_prints_requests_and_asks_nothing(quick: Served, tmp_path: Path) -> None:
    done = subprocess.run(
        command_of(quick, tmp_path, "--budget", "1", "--dry-run"),
        env=environ_of(
            quick, CLOUDTRAIN_TEST_GUARD="sealed", AWS_ENDPOINT_URL="https://127.0.0.1:1"
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"TrainingJobName"') == 11
    assert "toolkit             1  not run, unless" in done.stdout
    assert "largest possible bill: 0.61 USD of a budget of 1.00 USD" in done.stdout
    assert "nothing was sent" in done.stdout
    assert not (tmp_path / "out").exists()
