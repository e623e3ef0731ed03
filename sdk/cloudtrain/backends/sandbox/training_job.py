"""A training job as SageMaker keeps it: statuses, transitions and times. A state machine that does nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.sandbox.warm_pool import SimulatedWarmPool
from cloudtrain.planning.warm_pool import AVAILABLE

ACCOUNT = "123456789012"
"""The account that moto answers for."""

SPOT_SHARE = 0.3
"""Part of spot training time that is billed here. AWS bills what the spot market says, "up to 90 %" less; the figure
is a stand-in, so that BillableTimeInSeconds and TrainingTimeInSeconds differ as they do there."""

FAILURE_CHARACTERS = 1024  # botocore's model of FailureReason
_HEALTHY_FAILURES = ("AlgorithmError", "ClientError")
"""Failures that leave the cluster as it was, so that it may be kept. Source: AWS's guide of warm pools, Creation."""
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
"""TrainingJobStatus by the secondary status that a job ends with (AWS's reference of DescribeTrainingJob)."""

# That every end by a limit goes through Stopping, also of a job that never got instances: "Managed Spot Training
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
"""Seconds since the epoch."""


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
    """One training job. Every method may be called by any thread.

    Attributes:
        request: The CreateTrainingJob document as it came.
        clock: What the time is.
        stop_asked: Set when somebody has called StopTrainingJob.
        metrics: Latest value and its time by the names of MetricDefinitions.
    """

    request: Mapping[str, Any]
    region: str
    clock: Clock
    stop_asked: threading.Event = field(default_factory=threading.Event)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._transitions: list[_Transition] = []
        self._is_stopping = False
        self._failure = ""
        self._trained = 0.0
        self._attempt_began: float | None = None
        self._pool: SimulatedWarmPool | None = None
        self._selected: tuple[str, int] | None = None
        self.tags = [dict(tag) for tag in self.request.get("Tags", ())]
        self.created = self.clock()
        self.modified = self.created
        self.began: float | None = None
        self.ended: float | None = None
        self.enter("Starting", "Starting the training job")

    # ------------------------------------------------------------ what it is

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
        """Instance types that it may run on, with their counts, in order of preference; one after one is selected."""
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
        """Instance type and count that it runs on, or would like most."""
        return self.choices[0]

    @property
    def pool_status(self) -> str:
        """WarmPoolStatus.Status, or an empty string where it has no pool."""
        with self._lock:
            return "" if self._pool is None else self._pool.status

    def limit(self, name: str) -> int | None:
        """Return a field of StoppingCondition in seconds, or None."""
        value = self.request["StoppingCondition"].get(name)
        return None if value is None else int(value)

    # ------------------------------------------------------------ what happens to it

    def enter(self, secondary: str, message: str = "", *, failure: str = "") -> None:
        """Go to the next secondary status.

        Raises:
            ValueError: SageMaker's jobs do not go this way.
        """
        with self._lock:
            now = self.clock()
            if secondary not in _NEXT.get(self.secondary, frozenset()):
                raise ValueError(f"{self.name}: a job does not go from {self.secondary} to {secondary}")
            if self._transitions:
                self._transitions[-1].ended = now
            self._keep_time(secondary, now)
            self._is_stopping = self._is_stopping or secondary == "Stopping"
            self._failure = failure[:FAILURE_CHARACTERS]
            self.modified = now
            end = now if secondary in _ENDS else None
            if end is not None and self._pool is not None:
                self._pool.leave(is_healthy=not failure or failure.startswith(_HEALTHY_FAILURES))
            text = message or failure or _MESSAGES[secondary]
            self._transitions.append(_Transition(secondary, text, now, end))

    def select(self, instance_type: str, count: int) -> None:
        """Decide what it runs on: from now on it holds these instances."""
        with self._lock:
            self._selected = (instance_type, count)
            keep_alive = float(self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)
            if keep_alive and self._pool is None:
                self._pool = SimulatedWarmPool(keep_alive, self.clock)

    def give_pool_to(self, other: TrainingJob) -> bool:
        """Let another job take over the cluster that this one has left behind; return whether it is still there."""
        with self._lock:
            if self._pool is None or self._pool.status != AVAILABLE:
                return False
            self._pool.ended = self.clock()
            self._pool.reused_by = other.name
        other.select(*self.cluster)
        other.take_pool()
        return True

    def take_pool(self) -> None:
        """Run in the warm pool of another job. It is kept afterwards only where this job asks for it."""
        with self._lock:
            self._pool = self._pool or SimulatedWarmPool(0.0, self.clock)

    def keep_pool_for(self, seconds: float) -> None:
        """Change how long the warm pool is kept; 0 ends it.

        Raises:
            ValueError: it does not wait for a job.
        """
        with self._lock:
            if self._pool is None or self._pool.status != AVAILABLE:
                raise ValueError(f"{self.name} has no warm pool that is {AVAILABLE}")
            self._pool.keep_for(seconds)
            self.modified = self.clock()

    def tell(self, message: str) -> None:
        """Replace the message of the present status."""
        with self._lock:
            self._transitions[-1].message = message
            self.modified = self.clock()

    def begin_earlier(self, seconds: float) -> None:
        """Let a new job have been created so long ago."""
        with self._lock:
            self.created -= seconds
            self._transitions[0].started -= seconds

    def _keep_time(self, secondary: str, now: float) -> None:
        """Count training time from the download on, as AWS bills it; not while a job waits for instances."""
        if secondary == "Downloading":
            self.began = self.began or now
            self._attempt_began = now
        elif secondary in ("Interrupted", "Restarting", *_ENDS) and self._attempt_began is not None:
            self._trained += now - self._attempt_began
            self._attempt_began = None
        if secondary in _ENDS and self.began is not None:
            self.ended = now

    @property
    def seconds_trained(self) -> float:
        """Wall-clock seconds on instances so far, over all attempts."""
        with self._lock:
            running = 0.0 if self._attempt_began is None else self.clock() - self._attempt_began
            return self._trained + running

    # ------------------------------------------------------------ what is told of it

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
        """Return the answer to DescribeTrainingJob: every field of the request, and what has become of it."""
        with self._lock:
            asked = {name: value for name, value in self.request.items() if name not in _NOT_DESCRIBED}
            seconds = round(self.seconds_trained)
            has_run = self.ended is not None
            told = {
                **self.summary(),
                "FailureReason": self._failure or None,
                "TrainingStartTime": self.began,
                "ResourceConfig": self._resources(),
                "SecondaryStatusTransitions": [transition.to_json() for transition in self._transitions],
                "FinalMetricDataList": list(self._final_metrics()) or None,
                "ModelArtifacts": {"S3ModelArtifacts": f"{self.output_uri}/model.tar.gz"}
                if self.status in ("Completed", "Stopped") and self.began is not None
                else None,
                "TrainingTimeInSeconds": seconds if has_run else None,
                "BillableTimeInSeconds": (self._billable(seconds) if has_run else None),
                "EnableNetworkIsolation": bool(self.request.get("EnableNetworkIsolation")),
                "EnableInterContainerTrafficEncryption": bool(
                    self.request.get("EnableInterContainerTrafficEncryption")
                ),
                "EnableManagedSpotTraining": self.is_spot,
            }
            return {**asked, **_without_none(told)}

    def _billable(self, seconds: int) -> int:
        return round(seconds * SPOT_SHARE) if self.is_spot else seconds

    @property
    def output_uri(self) -> str:
        """Folder of model.tar.gz and output.tar.gz in S3."""
        return f"{self.request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{self.name}/output"

    def _resources(self) -> dict[str, Any]:
        resources = dict(self.request["ResourceConfig"])
        if self._pool is not None and "KeepAlivePeriodInSeconds" in resources:
            resources["KeepAlivePeriodInSeconds"] = round(self._pool.keep_alive)
        if "InstancePreferences" in resources and self._selected is not None:
            resources["SelectedInstanceType"], resources["SelectedInstanceCount"] = self._selected
        return resources

    def _final_metrics(self) -> Iterator[dict[str, Any]]:
        for name, (value, moment) in list(self.metrics.items()):
            yield {"MetricName": name, "Value": value, "Timestamp": moment}


_NOT_DESCRIBED = ("Tags", "SessionChainingConfig")
"""Fields of the request that DescribeTrainingJob does not have (botocore's model; a test compares)."""


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
