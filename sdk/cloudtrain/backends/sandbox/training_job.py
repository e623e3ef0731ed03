"""State of a training job in SageMaker: statuses, transitions and times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.sandbox.warm_pool import SimulatedWarmPool
from cloudtrain.planning.warm_pool import AVAILABLE

ACCOUNT = "123456789012"
"""The account that moto simulates."""

SPOT_PRICE_RATIO = 0.3
"""Share of spot training time that the sandbox bills. AWS bills market prices, up to 90 % below on demand. This example
value makes BillableTimeInSeconds and TrainingTimeInSeconds differ as they do in AWS."""

FAILURE_CHARACTERS = 1024  # botocore's model of FailureReason
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

# A job that reaches a limit passes through Stopping, even without instances. Source: "Managed Spot Training
# Lifecycle" in SageMaker's developer guide, read 2026-11.
_NEXT: Mapping[str, frozenset[str]] = {
    "": frozenset({"Starting"}),
    "Starting": frozenset({"Pending", "Downloading", "Stopping", "Failed"}),
    "Pending": frozenset({"Downloading", "Stopping", "Failed"}),
    "Downloading": frozenset({"Training", "Stopping", "Failed"}),
    "Training": frozenset({"Uploading", "Interrupted", "Restarting", "Stopping", "Failed"}),
    "Interrupted": frozenset({"Starting", "Stopping", "Failed"}),
    "Restarting": frozenset({"Starting", "Stopping", "Failed"}),
    "Stopping": frozenset({"Uploading", "Stopped", "MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Failed"}),
    "Uploading": frozenset({"Completed", "Stopped", "MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Failed"}),
}

Clock = Callable[[], float]
"""Callback that returns the time in seconds since the epoch."""


@dataclass
class _Transition:
    status: str
    message: str
    started: float
    ended: float | None = None

    def to_json(self) -> dict[str, Any]:
        ended = {} if self.ended is None else {"EndTime": self.ended}
        return {"Status": self.status, "StartTime": self.started, **ended, "StatusMessage": self.message}


@dataclass
class TrainingJob:
    """One training job. Thread-safe.

    Attributes:
        request: The CreateTrainingJob request.
        region: Its region.
        clock: Callback that returns the time in seconds since the epoch.
        is_stop_requested: Set by StopTrainingJob.
        metrics: Latest value and its time by the names of MetricDefinitions.
    """

    request: Mapping[str, Any]
    region: str
    clock: Clock
    is_stop_requested: threading.Event = field(default_factory=threading.Event)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._transitions: list[_Transition] = []
        self._is_stopping = False
        self._failure = ""
        self._training_seconds = 0.0
        self._attempt_started: float | None = None
        self._pool: SimulatedWarmPool | None = None
        self._selected: tuple[str, int] | None = None
        self.tags = [dict(tag) for tag in self.request.get("Tags", ())]
        self.created = self.clock()
        self.modified = self.created
        self.started: float | None = None
        self.ended: float | None = None
        self.enter("Starting", "Starting the training job")

    @property
    def name(self) -> str:
        """TrainingJobName."""
        return str(self.request["TrainingJobName"])

    @property
    def arn(self) -> str:
        """TrainingJobArn."""
        return f"arn:aws:sagemaker:{self.region}:{ACCOUNT}:training-job/{self.name}"

    @property
    def is_spot(self) -> bool:
        """Whether it runs on managed spot instances."""
        return bool(self.request.get("EnableManagedSpotTraining"))

    @property
    def secondary(self) -> str:
        """SecondaryStatus."""
        return self._transitions[-1].status if self._transitions else ""

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
        """Change the secondary status.

        Raises:
            ValueError: SageMaker has no such transition.
        """
        with self._lock:
            now = self.clock()
            if secondary not in _NEXT.get(self.secondary, frozenset()):
                raise ValueError(f"{self.name}: no transition from {self.secondary!r} to {secondary!r}")
            if self._transitions:
                self._transitions[-1].ended = now
            self._record_time(secondary, now)
            self._is_stopping = self._is_stopping or secondary == "Stopping"
            self._failure = failure[:FAILURE_CHARACTERS]
            self.modified = now
            end = now if secondary in _ENDS else None
            if end is not None and self._pool is not None:
                self._pool.release(is_healthy=not failure or failure.startswith(_HEALTHY_FAILURES))
            text = message or failure or _MESSAGES[secondary]
            self._transitions.append(_Transition(secondary, text, now, end))

    def select(self, instance_type: str, count: int) -> None:
        """Assign instances to the job."""
        with self._lock:
            self._selected = (instance_type, count)
            keep_alive = float(self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)
            if keep_alive and self._pool is None:
                self._pool = SimulatedWarmPool(keep_alive, self.clock)

    def give_pool_to(self, other: TrainingJob) -> bool:
        """Let another job reuse the warm pool of this one; return False if the pool is no longer available."""
        with self._lock:
            if self._pool is None or self._pool.status != AVAILABLE:
                return False
            self._pool.ended = self.clock()
            self._pool.reused_by = other.name
        other.select(*self.cluster)
        other.enter_pool()
        return True

    def enter_pool(self) -> None:
        """Run in the warm pool of another job. Afterwards the pool is kept only if this job requests it."""
        with self._lock:
            self._pool = self._pool or SimulatedWarmPool(0.0, self.clock)

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

    def set_message(self, message: str) -> None:
        """Replace the message of the current status."""
        with self._lock:
            self._transitions[-1].message = message
            self.modified = self.clock()

    def backdate(self, seconds: float) -> None:
        """Move the creation of a new job into the past."""
        with self._lock:
            self.created -= seconds
            self._transitions[0].started -= seconds

    def _record_time(self, secondary: str, now: float) -> None:
        """Count training time from the download on, as AWS bills it; waiting for instances does not count."""
        if secondary == "Downloading":
            self.started = self.started or now
            self._attempt_started = now
        elif secondary in ("Interrupted", "Restarting", *_ENDS) and self._attempt_started is not None:
            self._training_seconds += now - self._attempt_started
            self._attempt_started = None
        if secondary in _ENDS and self.started is not None:
            self.ended = now

    @property
    def training_seconds(self) -> float:
        """Wall-clock seconds on instances so far, over all attempts."""
        with self._lock:
            running = 0.0 if self._attempt_started is None else self.clock() - self._attempt_started
            return self._training_seconds + running

    def summary(self) -> dict[str, Any]:
        """Return its entry in ListTrainingJobs."""
        with self._lock:
            return _without_none(
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
            request = {name: value for name, value in self.request.items() if name not in _NOT_DESCRIBED}
            seconds = round(self.training_seconds)
            has_run = self.ended is not None
            state = {
                **self.summary(),
                "FailureReason": self._failure or None,
                "TrainingStartTime": self.started,
                "ResourceConfig": self._resources(),
                "SecondaryStatusTransitions": [transition.to_json() for transition in self._transitions],
                "FinalMetricDataList": list(self._final_metrics()) or None,
                "ModelArtifacts": {"S3ModelArtifacts": f"{self.output_uri}/model.tar.gz"}
                if self.status in ("Completed", "Stopped") and self.started is not None
                else None,
                "TrainingTimeInSeconds": seconds if has_run else None,
                "BillableTimeInSeconds": (self._billable(seconds) if has_run else None),
                "EnableNetworkIsolation": bool(self.request.get("EnableNetworkIsolation")),
                "EnableInterContainerTrafficEncryption": bool(
                    self.request.get("EnableInterContainerTrafficEncryption")
                ),
                "EnableManagedSpotTraining": self.is_spot,
            }
            return {**request, **_without_none(state)}

    def _billable(self, seconds: int) -> int:
        return round(seconds * SPOT_PRICE_RATIO) if self.is_spot else seconds

    @property
    def output_uri(self) -> str:
        """Folder of model.tar.gz and output.tar.gz in S3."""
        return f"{self.request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{self.name}/output"

    def _resources(self) -> dict[str, Any]:
        resources = dict(self.request["ResourceConfig"])
        if self._pool is not None and "KeepAlivePeriodInSeconds" in resources:
            resources["KeepAlivePeriodInSeconds"] = round(self._pool.keep_alive_seconds)
        if "InstancePreferences" in resources and self._selected is not None:
            resources["SelectedInstanceType"], resources["SelectedInstanceCount"] = self._selected
        return resources

    def _final_metrics(self) -> Iterator[dict[str, Any]]:
        for name, (value, moment) in list(self.metrics.items()):
            yield {"MetricName": name, "Value": value, "Timestamp": moment}


_NOT_DESCRIBED = ("Tags", "SessionChainingConfig")
"""Fields of the request that DescribeTrainingJob does not return (botocore's model; a test compares)."""


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
