"""What the sandbox, the cost ledger and the documentation assume of SageMaker, and how an observation is compared.

Uses the standard library only, because the documentation's build reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aws_day.times import Times

_API = "https://docs.aws.amazon.com/sagemaker/latest/APIReference"
_GUIDE = "https://docs.aws.amazon.com/sagemaker/latest/dg"
DESCRIBE = f"{_API}/API_DescribeTrainingJob.html"
CREATE = f"{_API}/API_CreateTrainingJob.html"
STOP = f"{_API}/API_StopTrainingJob.html"
STREAMS = f"{_GUIDE}/logging-cloudwatch.html"
CONTAINER = f"{_GUIDE}/your-algorithms-training-algo-running-container.html"
SPOT = f"{_GUIDE}/model-managed-spot-training.html"
POOLS = f"{_GUIDE}/train-warm-pools.html"
CHECKPOINTS = f"{_GUIDE}/model-checkpoints.html"
SMDDP = f"{_GUIDE}/data-parallel.html"
DOCKERFILE = f"{_GUIDE}/your-algorithms-training-algo-dockerfile.html"
OUTPUT = f"{_GUIDE}/your-algorithms-training-algo-output.html"
EXIT_CODES = f"{_GUIDE}/your-algorithms-training-signal-success-failure.html"
STOPPING = f"{_API}/API_StoppingCondition.html"
POOL_STATUS = f"{_API}/API_WarmPoolStatus.html"
POOL_USE = f"{_GUIDE}/train-warm-pools-how-to-use.html"
LATE = "https://github.com/aws/sagemaker-python-sdk/issues/4451"
BILLED = "https://github.com/aws/sagemaker-python-sdk/pull/30"

DOCUMENTED, INFERRED, REPORTED = "documented", "inferred", "reported"
BASES = {
    DOCUMENTED: "AWS's page in the row says so",
    INFERRED: "concluded from the page or report in the row, which does not say it itself",
    REPORTED: "a public report in the row says so, not AWS's documentation",
}
"""What an assumption rests on."""

OPTIONAL_STATUSES = (
    "Pending",
    "LaunchingMLInstances",
    "PreparingTrainingStack",
    "DownloadingTrainingImage",
)
"""Secondary statuses that a job may skip: waiting for instances, and those that AWS's reference calls obsolete."""


@dataclass(frozen=True)
class Assumption:
    """One assumption.

    Attributes:
        key: Its name in a result.
        trial: The trial that observes it.
        statement: What is assumed, in a sentence.
        holds: Whether an observation agrees.
        expected: What the observation is to be; `{grace}` and others are replaced by the times of the day.
        basis: One of `BASES`: what it rests on.
        document: The page of AWS, or the public report, that it rests on.
        used_in: The place of cloudtrain that relies on it, from the root of the repository.
    """

    key: str
    trial: str
    statement: str
    holds: Callable[[Any, Times], bool]
    expected: str
    basis: str
    document: str
    used_in: str

    def expected_with(self, times: Times) -> str:
        """Return what is expected, with the day's times."""
        return self.expected.format(**times.to_json())


def _is(value: Any) -> Callable[[Any, Times], bool]:
    return lambda observed, times: observed == value


def _within(low: float, high: float) -> Callable[[Any, Times], bool]:
    return lambda observed, times: low <= float(observed) <= high


def _collapsed(statuses: list[str]) -> list[str]:
    """Return secondary statuses without those that a job may skip."""
    return [each for each in statuses if each not in OPTIONAL_STATUSES]


def _statuses(*wanted: str) -> Callable[[Any, Times], bool]:
    return lambda observed, times: _collapsed(observed) == list(wanted)


def _grace(observed: Any, times: Times) -> bool:
    return abs(float(observed) - times.grace) <= times.grace_tolerance


def _at_limit(observed: Any, times: Times) -> bool:
    return times.limit <= float(observed) <= times.limit + times.over_limit


def _streams(observed: Any, times: Times) -> bool:
    return bool(observed) and all(re.fullmatch(r"algo-\d+-\d+", name) for name in observed)


def _failure(observed: Any, times: Times) -> bool:
    return (
        re.fullmatch(r"AlgorithmError: .*ended with exit code 3.*, exit code: 1", observed)
        is not None
    )


_RUNNER = "sdk/cloudtrain/backends/sandbox/job_runner.py"
_JOB = "sdk/cloudtrain/backends/sandbox/training_job.py"
_CLIENT = "sdk/cloudtrain/backends/sagemaker"

ASSUMPTIONS: tuple[Assumption, ...] = (
    # One job that ends by itself.
    Assumption(
        "request.accepted", "complete", "SageMaker accepts the request of a plan for ml.m5.large.",
        _is(True), "true", INFERRED, CREATE, "sdk/cloudtrain/planning/request.py",
    ),
    Assumption(
        "request.described", "complete",
        "DescribeTrainingJob returns the members of the request as they were sent, without Tags.",
        _is([]), "no member differs", INFERRED, DESCRIBE, _JOB,
    ),
    Assumption(
        "submit.twice", "complete",
        "A second submit of the same request and code finds the live run and starts nothing.",
        _is({"attached": True, "jobs": 1}), "attached, 1 job", INFERRED, CREATE, f"{_CLIENT}/submit_lock.py",
    ),
    Assumption(
        "submit.same_name", "complete",
        "CreateTrainingJob refuses a name that a job of the account already has.",
        _is("ResourceInUse"), "ResourceInUse", INFERRED, CREATE,
        "sdk/cloudtrain/backends/sandbox/training_job_operations.py",
    ),
    Assumption(
        "statuses.complete", "complete", "The secondary statuses of a job that succeeds, in order.",
        _statuses("Starting", "Downloading", "Training", "Uploading", "Completed"),
        "Starting, [Pending], Downloading, Training, Uploading, Completed", INFERRED, DESCRIBE, _JOB,
    ),
    Assumption(
        "statuses.contiguous", "complete", "Each secondary status ends when the next one begins.",
        _is(True), "true", INFERRED, DESCRIBE, f"{_CLIENT}/job_states.py",
    ),
    Assumption(
        "status.complete", "complete", "The job's status, and that of the run.",
        _is(["Completed", "SUCCEEDED"]), "Completed, SUCCEEDED", DOCUMENTED, DESCRIBE, f"{_CLIENT}/job_states.py",
    ),
    Assumption(
        "logs.streams", "complete", "A host writes to one stream, <job>/<host>-<number>.",
        _streams, "algo-1-<number>", DOCUMENTED, STREAMS, f"{_CLIENT}/log_streams.py",
    ),
    Assumption(
        "logs.delay", "complete", "CloudWatch has a line seconds after it was printed.",
        lambda observed, times: float(observed) <= times.log_delay, "at most {log_delay} s",
        INFERRED, STREAMS, f"{_CLIENT}/log_tail.py",
    ),
    Assumption(
        "logs.complete", "complete", "`logs` returns every line once and in order.",
        _is("200 of 200, in order"), "200 of 200, in order", INFERRED, STREAMS, f"{_CLIENT}/logs.py",
    ),
    Assumption(
        "metrics.final", "complete", "FinalMetricDataList has the last value that a metric's pattern found.",
        _is([["train/loss", 0.25]]), "train/loss 0.25", INFERRED, DESCRIBE,
        "sdk/cloudtrain/backends/sandbox/cloudwatch_logs.py",
    ),
    Assumption(
        "model.place", "complete", "The model is <S3OutputPath>/<job>/output/model.tar.gz.",
        _is([True, True]), "at its place, and stored", INFERRED, OUTPUT,
        "sdk/cloudtrain/planning/storage_layout.py",
    ),
    Assumption(
        "container.config", "complete", "The files that SageMaker writes to /opt/ml/input/config.",
        lambda observed, times: {
            "hyperparameters.json", "inputdataconfig.json", "resourceconfig.json"
        } <= set(observed),
        "hyperparameters.json, inputdataconfig.json, resourceconfig.json", DOCUMENTED, CONTAINER,
        "sdk/cloudtrain/backends/container/filesystem.py",
    ),
    Assumption(
        "bill.seconds", "complete", "On demand, BillableTimeInSeconds is TrainingTimeInSeconds.",
        _is(0), "difference 0 s", INFERRED, DESCRIBE, _JOB,
    ),
    Assumption(
        "bill.phases", "complete",
        "AWS bills from the download to the end of the upload, and not the provisioning.",
        _within(-30, 30), "within 30 s of the phases' sum", INFERRED, BILLED, f"{_CLIENT}/job_states.py",
    ),
    Assumption(
        "bill.ledger", "complete", "`costs` shows billable seconds x price of the plan.",
        _within(-0.0001, 0.0001), "difference 0 USD", INFERRED, DESCRIBE, "sdk/cloudtrain/runs/billing.py",
    ),
    # A failure.
    Assumption(
        "failure.status", "failure", "A container that ends with another code than 0 fails its job.",
        _is(["Failed", "FAILED"]), "Failed, FAILED", DOCUMENTED, EXIT_CODES, f"{_CLIENT}/job_states.py",
    ),
    Assumption(
        "failure.reason", "failure",
        "FailureReason is the text that cloudtrain's launcher writes to /opt/ml/output/failure, and its exit code.",
        _failure, "AlgorithmError: <text with exit code 3>, exit code: 1", INFERRED, OUTPUT, _RUNNER,
    ),
    Assumption(
        "failure.statuses", "failure", "The secondary statuses of a job that fails, in order.",
        _statuses("Starting", "Downloading", "Training", "Failed"),
        "Starting, [Pending], Downloading, Training, Failed", INFERRED, DESCRIBE, _RUNNER,
    ),
    # Stops.
    Assumption(
        "stop.grace", "grace", "A stop sends SIGTERM, and SIGKILL {grace} s later.",
        _grace, "{grace} s, within {grace_tolerance} s", DOCUMENTED, DOCKERFILE, "sdk/cloudtrain/planning/cost.py",
    ),
    Assumption(
        "stop.statuses", "grace", "The secondary statuses of a job that is stopped, in order.",
        _statuses("Starting", "Downloading", "Training", "Stopping", "Uploading", "Stopped"),
        "Starting, [Pending], Downloading, Training, Stopping, Uploading, Stopped", INFERRED, STOP, _RUNNER,
    ),
    Assumption(
        "stop.status", "grace", "A job whose container was killed is Stopped.",
        _is("Stopped"), "Stopped", DOCUMENTED, STOP, _RUNNER,
    ),
    Assumption(
        "stop.again", "grace", "StopTrainingJob refuses a job that has ended.",
        _is("ValidationException"), "ValidationException", INFERRED, STOP,
        "sdk/cloudtrain/backends/sandbox/training_job_operations.py",
    ),
    Assumption(
        "stop.own_end", "resume",
        "A job that ends by itself with code 0 after SIGTERM is Stopped, not Completed.",
        _is(["Stopped", "STOPPED"]), "Stopped, STOPPED", INFERRED, STOP, f"{_CLIENT}/job_states.py",
    ),
    # Checkpoints.
    Assumption(
        "resume.uploaded", "resume", "What a job writes after SIGTERM to /opt/ml/checkpoints is in S3 at its end.",
        _is(True), "true", INFERRED, CHECKPOINTS, "sdk/cloudtrain/backends/container/folder_sync.py",
    ),
    Assumption(
        "resume.exact", "resume", "A resumed run finds the last state and continues it exactly.",
        _is({"from": "the stopped step", "digest": "equal"}), "from the stopped step, equal digest",
        INFERRED, CHECKPOINTS, "docs/how-to/resume.md",
    ),
    # The time limit.
    Assumption(
        "limit.status", "limit", "A job that reaches MaxRuntimeInSeconds is Stopped, MaxRuntimeExceeded.",
        _is(["Stopped", "MaxRuntimeExceeded", "STOPPED"]), "Stopped, MaxRuntimeExceeded, STOPPED",
        DOCUMENTED, DESCRIBE, f"{_CLIENT}/job_states.py",
    ),
    Assumption(
        "limit.signal", "limit", "The end of MaxRuntimeInSeconds reaches the container as SIGTERM.",
        _is(True), "true", DOCUMENTED, STOPPING, "docs/how-to/resume.md",
    ),
    Assumption(
        "limit.billed", "limit", "AWS bills at most {over_limit} s beyond MaxRuntimeInSeconds.",
        _at_limit, "{limit} s, and at most {over_limit} s more", REPORTED, LATE, "sdk/cloudtrain/planning/cost.py",
    ),
    # Spot.
    Assumption(
        "spot.billed", "spot", "Of spot instances AWS bills fewer seconds than they trained.",
        lambda observed, times: observed["billable"] < observed["training"],
        "BillableTimeInSeconds below TrainingTimeInSeconds", DOCUMENTED, SPOT, _JOB,
    ),
    Assumption(
        "spot.described", "spot", "DescribeTrainingJob returns EnableManagedSpotTraining and MaxWaitTimeInSeconds.",
        lambda observed, times: observed == [True, times.spot_wait], "true, {spot_wait}", DOCUMENTED, DESCRIBE,
        "sdk/cloudtrain/planning/request.py",
    ),
    # Warm pools.
    Assumption(
        "pool.available", "warm pool", "After its job, a cluster with KeepAlivePeriodInSeconds is Available.",
        _is("Available"), "Available", DOCUMENTED, POOL_STATUS, _JOB,
    ),
    Assumption(
        "pool.reused", "warm pool", "The next job that matches takes it.",
        _is(["Reused", "the second job"]), "Reused, the second job", DOCUMENTED, POOL_STATUS,
        "sdk/cloudtrain/planning/warm_pool.py",
    ),
    Assumption(
        "pool.start", "warm pool", "A job that takes a warm pool trains sooner after its creation.",
        lambda observed, times: observed["second"] < observed["first"],
        "the second start is faster", DOCUMENTED, POOLS, "docs/how-to/capacity.md",
    ),
    Assumption(
        "pool.billed", "warm pool", "A pool that has ended has ResourceRetainedBillableTimeInSeconds.",
        lambda observed, times: observed is not None and float(observed) >= 0, "a number of seconds",
        DOCUMENTED, POOL_STATUS, "sdk/cloudtrain/backends/sagemaker/billing.py",
    ),
    Assumption(
        "pool.ended", "warm pool", "KeepAlivePeriodInSeconds 0 ends a pool.",
        _is("Terminated"), "Terminated", DOCUMENTED, POOL_USE, _JOB,
    ),
    # Several instances.
    Assumption(
        "instances.sum", "two instances", "Two instances reach each other: the sum of an all-reduce over their ranks.",
        _is({"world": 2, "sum": 3.0, "ranks": [0, 1]}), "3 on 2 ranks", INFERRED, CONTAINER,
        "entrypoints/cloudtrain_runtime/launcher",
    ),
    Assumption(
        "instances.streams", "two instances", "Each instance has a stream of its own.",
        _is(["algo-1", "algo-2"]), "algo-1, algo-2", DOCUMENTED, STREAMS, f"{_CLIENT}/log_streams.py",
    ),
    # GPUs.
    Assumption(
        "gpu.accepted", "gpu", "SageMaker accepts the request of a plan for ml.g4dn.xlarge.",
        _is(True), "true", INFERRED, CREATE, "sdk/cloudtrain/planning/request.py",
    ),
    Assumption(
        "gpu.described", "gpu", "DescribeTrainingJob returns the members of that request as they were sent.",
        _is([]), "no member differs", INFERRED, DESCRIBE, _JOB,
    ),
    Assumption(
        "gpu.status", "gpu", "The job's status, and that of the run.",
        _is(["Completed", "SUCCEEDED"]), "Completed, SUCCEEDED", DOCUMENTED, DESCRIBE, f"{_CLIENT}/job_states.py",
    ),
    # AWS's own launcher.
    Assumption(
        "toolkit.sum", "toolkit", "AWS's toolkit starts one rank per GPU with `pytorchddp`, and they reach each other.",
        lambda observed, times: observed["world"] == len(observed["ranks"]) > 1
        and observed["sum"] == sum(range(1, observed["world"] + 1)),
        "the sum over all ranks", INFERRED, SMDDP, "entrypoints/cloudtrain_runtime/launcher/toolkit.py",
    ),
    Assumption(
        "toolkit.status", "toolkit", "The job's status, and that of the run.",
        _is(["Completed", "SUCCEEDED"]), "Completed, SUCCEEDED", INFERRED, SMDDP, f"{_CLIENT}/job_states.py",
    ),
    # All trials.
    Assumption(
        "check.predicts", "all", "`check` fails where AWS refuses the job, and nowhere else.",
        _is([]), "no trial where they differ", INFERRED, CREATE, "sdk/cloudtrain/preflight",
    ),
    Assumption(
        "bill.estimate", "all", "No job costs more than the estimate of its plan.",
        _is([]), "no job above its estimate", INFERRED, LATE, "sdk/cloudtrain/planning/cost.py",
    ),
)  # fmt: skip

BY_KEY = {each.key: each for each in ASSUMPTIONS}
