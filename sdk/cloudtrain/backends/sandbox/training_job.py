"""State of a training job in SageMaker: statuses, transitions, times, and its warm pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.sandbox.resources import arn_of, without_none
from cloudtrain.planning.warm_pool import AVAILABLE, differences

SPOT_PRICE_RATIO = 0.3
"""Share of spot training time that the sandbox bills. AWS bills market prices, up to 90 % below on demand. This example
value makes BillableTimeInSeconds and TrainingTimeInSeconds differ as they do in AWS."""

# From botocore's model of FailureReason.
FAILURE_CHARACTERS = 1024
_HEALTHY_FAILURES = ("AlgorithmError", "ClientError")
"""Failures after which AWS keeps the cluster as a warm pool. Source: AWS's guide of warm pools, Creation."""
FINAL = frozenset({"Completed", "Failed", "Stopped"})

_MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Pending": "Training job waiting for capacity",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Training job interrupted: the managed spot training instances were taken away",
    "Restarting": "Restarting the training job after an internal error",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
}
_ENDS = {
    "Completed": "Completed",
    "Failed": "Failed",
    "Stopped": "Stopped",
    "MaxRuntimeExceeded": "Stopped",
    "MaxWaitTimeExceeded": "Stopped",
}
"""TrainingJobStatus by final secondary status (AWS's reference of DescribeTrainingJob)."""

Clock = Callable[[], float]
"""Callback that returns the time in seconds since the epoch."""


@dataclass
class SimulatedWarmPool:
    """The warm pool of one job: its cluster, kept for the next job. The job's lock guards it.

    Attributes:
        keep_alive_seconds: Time that the pool is kept after the job.
        clock: Callback that returns the time in seconds since the epoch.
        available_since: When the job ended; 0.0 before.
        until: When the pool ends or has ended, or None before the end of its job.
        reused_by: Name of the job that reused it, or an empty string.
    """

    keep_alive_seconds: float
    clock: Clock
    available_since: float = 0.0
    until: float | None = None
    reused_by: str = ""

    @property
    def status(self) -> str:
        """WarmPoolResourceStatus."""
        if self.reused_by:
            return "Reused"
        if self.until is None:
            return "InUse"
        return AVAILABLE if self.clock() < self.until else "Terminated"

    def release(self, *, is_healthy: bool) -> None:
        """Make the pool available after its job; an unhealthy cluster is not kept."""
        self.available_since = self.clock()
        self.until = self.available_since + (self.keep_alive_seconds if is_healthy else 0)

    def keep_for(self, seconds: float) -> None:
        """Change how long it is kept, counted from the end of its job; 0 terminates it."""
        self.keep_alive_seconds = seconds
        self.until = max(self.available_since + seconds, self.clock())

    def to_json(self) -> dict[str, Any]:
        """Return WarmPoolStatus. It has the billed time once the pool has ended."""
        status: dict[str, Any] = {"Status": self.status}
        if self.until is not None and status["Status"] != AVAILABLE:
            status["ResourceRetainedBillableTimeInSeconds"] = round(
                self.until - self.available_since
            )
        return {**status, **({"ReusedByJob": self.reused_by} if self.reused_by else {})}


@dataclass
class TrainingJob:
    """One training job. Thread-safe.

    Attributes:
        request: The CreateTrainingJob request.
        clock: Callback that returns the time in seconds since the epoch.
        tuning_arn: ARN of the tuning job that started it, or None.
        is_stop_requested: Set by StopTrainingJob.
        metrics: Latest value and its time by the names of MetricDefinitions.
        name: TrainingJobName.
        arn: TrainingJobArn.
        is_spot: Whether it runs on managed spot instances.
        tags: Its tags.
        output_uri: Folder of model.tar.gz (or model/) and output.tar.gz in S3.
    """

    request: Mapping[str, Any]
    clock: Clock
    tuning_arn: str | None = None
    is_stop_requested: threading.Event = field(default_factory=threading.Event)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = str(self.request["TrainingJobName"])
        self.arn = arn_of("training-job", self.name)
        self.is_spot = bool(self.request.get("EnableManagedSpotTraining"))
        self.tags = list(self.request.get("Tags", ()))
        self.output_uri = (
            f"{self.request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{self.name}/output"
        )
        self._lock = threading.RLock()
        self._transitions: list[dict[str, Any]] = []
        self._is_stopping = False
        self.failure = ""
        self._training_seconds = 0.0
        self._attempt_started: float | None = None
        self._pool: SimulatedWarmPool | None = None
        self._selected: tuple[str, int] | None = None
        self.created = self.clock()
        self.modified = self.created
        self.started: float | None = None
        self.ended: float | None = None
        self.enter("Starting", "Starting the training job")

    @property
    def secondary(self) -> str:
        """SecondaryStatus."""
        return str(self._transitions[-1]["Status"]) if self._transitions else ""

    @property
    def status(self) -> str:
        """TrainingJobStatus."""
        with self._lock:
            return _ENDS.get(self.secondary, "Stopping" if self._is_stopping else "InProgress")

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.status in FINAL

    @property
    def choices(self) -> tuple[tuple[str, int], ...]:
        """Instance types and counts that it may run on, in order of preference; only one after `select`."""
        if self._selected is not None:
            return (self._selected,)
        resources = self.request["ResourceConfig"]
        count = int(resources.get("InstanceCount") or 0)
        if "InstancePreferences" not in resources:
            return ((str(resources["InstanceType"]), count),)
        return tuple(
            (str(each["InstanceType"]), int(each.get("InstanceCount") or count))
            for each in resources["InstancePreferences"]
        )

    @property
    def cluster(self) -> tuple[str, int]:
        """Selected instance type and count, or the first choice."""
        return self.choices[0]

    @property
    def pool_status(self) -> str:
        """WarmPoolStatus.Status, or an empty string without a pool."""
        with self._lock:
            return "" if self._pool is None else self._pool.status

    def limit(self, name: str) -> int | None:
        """Return a field of StoppingCondition in seconds, or None."""
        value = self.request["StoppingCondition"].get(name)
        return None if value is None else int(value)

    def enter(self, secondary: str, message: str = "", *, failure: str = "") -> None:
        """Change the secondary status."""
        with self._lock:
            now = self.clock()
            if self._transitions:
                self._transitions[-1]["EndTime"] = now
            self._record_time(secondary, now)
            self._is_stopping = self._is_stopping or secondary == "Stopping"
            self.failure = failure[:FAILURE_CHARACTERS]
            self.modified = now
            text = message or failure or _MESSAGES[secondary]
            self._transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": text})
            if secondary in _ENDS:
                self._transitions[-1]["EndTime"] = now
                if self._pool is not None:
                    self._pool.release(
                        is_healthy=not failure or failure.startswith(_HEALTHY_FAILURES)
                    )

    def select(self, instance_type: str, count: int, *, is_warm: bool = False) -> None:
        """Assign instances, which may be of a warm pool (`is_warm`). They are kept only if the job requests it."""
        with self._lock:
            if self.secondary == "Pending":
                self._transitions[-1]["StatusMessage"] = _MESSAGES["Starting"]
                self.modified = self.clock()
            self._selected = (instance_type, count)
            keep_alive = float(self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)
            if (keep_alive or is_warm) and self._pool is None:
                self._pool = SimulatedWarmPool(keep_alive, self.clock)

    def give_pool_to(self, other: TrainingJob) -> bool:
        """Let another job reuse the warm pool of this one; return False if the pool is no longer available."""
        with self._lock:
            if self._pool is None or self._pool.status != AVAILABLE:
                return False
            self._pool.until = self.clock()
            self._pool.reused_by = other.name
        other.select(*self.cluster, is_warm=True)
        return True

    def keep_pool_for(self, seconds: float) -> None:
        """Change how long the warm pool is kept; 0 terminates it.

        Raises:
            ValueError: The job has no available warm pool.
        """
        with self._lock:
            if self._pool is None or self._pool.status != AVAILABLE:
                raise ValueError(f"{self.name} has no warm pool that is {AVAILABLE}")
            self._pool.keep_for(seconds)
            self.modified = self.clock()

    def backdate(self, seconds: float) -> None:
        """Move the creation of a new job into the past."""
        with self._lock:
            self.created -= seconds
            self._transitions[0]["StartTime"] -= seconds

    def _record_time(self, secondary: str, now: float) -> None:
        """Count training time from the download on, as AWS bills it; waiting for instances does not count."""
        if secondary == "Downloading":
            self.started = self.started or now
            self._attempt_started = now
        elif (
            secondary in ("Interrupted", "Restarting", *_ENDS) and self._attempt_started is not None
        ):
            self._training_seconds += now - self._attempt_started
            self._attempt_started = None
        if secondary in _ENDS and self.started is not None:
            self.ended = now

    @property
    def training_seconds(self) -> float:
        """Wall-clock seconds on instances so far, over all attempts."""
        with self._lock:
            running = 0.0
            if self._attempt_started is not None:
                running = self.clock() - self._attempt_started
            return self._training_seconds + running

    def summary(self) -> dict[str, Any]:
        """Return its entry in ListTrainingJobs."""
        with self._lock:
            return without_none(
                {
                    "TrainingJobName": self.name,
                    "TrainingJobArn": self.arn,
                    "CreationTime": self.created,
                    "TrainingEndTime": self.ended,
                    "LastModifiedTime": self.modified,
                    "TrainingJobStatus": self.status,
                    "SecondaryStatus": self.secondary,
                    "WarmPoolStatus": None if self._pool is None else self._pool.to_json(),
                }
            )

    def describe(self) -> dict[str, Any]:
        """Return the response to DescribeTrainingJob: the fields of the request and the job's state."""
        with self._lock:
            request = {
                name: value for name, value in self.request.items() if name not in _NOT_DESCRIBED
            }
            seconds = round(self.training_seconds)
            billed = round(seconds * SPOT_PRICE_RATIO) if self.is_spot else seconds
            has_run = self.ended is not None
            artifacts = None
            if self.status in ("Completed", "Stopped") and self.started is not None:
                is_folder = self.request["OutputDataConfig"].get("CompressionType") == "NONE"
                model = "model/" if is_folder else "model.tar.gz"
                artifacts = {"S3ModelArtifacts": f"{self.output_uri}/{model}"}
            metrics = [
                {"MetricName": name, "Value": value, "Timestamp": moment}
                for name, (value, moment) in list(self.metrics.items())
            ]
            flags = (
                "EnableNetworkIsolation",
                "EnableInterContainerTrafficEncryption",
                "EnableManagedSpotTraining",
            )
            state = {
                **self.summary(),
                "TuningJobArn": self.tuning_arn,
                "FailureReason": self.failure or None,
                "TrainingStartTime": self.started,
                "ResourceConfig": self._resources(),
                "SecondaryStatusTransitions": [
                    dict(transition) for transition in self._transitions
                ],
                "FinalMetricDataList": metrics or None,
                "ModelArtifacts": artifacts,
                "TrainingTimeInSeconds": seconds if has_run else None,
                "BillableTimeInSeconds": billed if has_run else None,
                **{flag: bool(self.request.get(flag)) for flag in flags},
            }
            return {**request, **without_none(state)}

    def _resources(self) -> dict[str, Any]:
        resources = dict(self.request["ResourceConfig"])
        if self._pool is not None and "KeepAlivePeriodInSeconds" in resources:
            resources["KeepAlivePeriodInSeconds"] = round(self._pool.keep_alive_seconds)
        if "InstancePreferences" in resources and self._selected is not None:
            resources["SelectedInstanceType"], resources["SelectedInstanceCount"] = self._selected
        return resources


_NOT_DESCRIBED = ("Tags", "SessionChainingConfig")
"""Fields of the request that DescribeTrainingJob does not return (botocore's model; a test compares)."""


class WarmPools:
    """The warm pools of an account. Each can be reused by one job only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[TrainingJob] = []

    def add(self, job: TrainingJob) -> None:
        """Register a job, which may leave a warm pool."""
        with self._lock:
            self._jobs.append(job)

    def take(self, job: TrainingJob) -> bool:
        """Give a job the newest matching pool; return whether one matched."""
        with self._lock:
            jobs = list(reversed(self._jobs))
        for other in jobs:
            if other is not job and other.pool_status == AVAILABLE:
                pool_request = {
                    **other.request,
                    "ResourceConfig": other.describe()["ResourceConfig"],
                }
                if not differences(pool_request, job.request) and other.give_pool_to(job):
                    return True
        return False
