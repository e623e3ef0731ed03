"""State of a tuning job in SageMaker: starts training jobs with searched hyperparameters and ranks them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.sandbox.request_validation import ServiceError
from cloudtrain.backends.sandbox.resources import arn_of, without_none
from cloudtrain.backends.sandbox.training_job import Clock, TrainingJob
from cloudtrain.backends.sandbox.tuning_search import grid, sample

FINAL = frozenset({"Completed", "Failed", "Stopped"})
OBJECTIVE_HYPERPARAMETER = "_tuning_objective_metric"
"""Hyperparameter by which SageMaker gives a trial the name of its objective (sagemaker-training-toolkit, params.py)."""
OBJECTIVE_METRIC = "FinalHyperParameterTuningJobObjectiveMetric"
"""Member of a trial's summary."""
_WITHOUT_OBJECTIVE = 5
# Both texts are AWS's.
_ALL_FAILED = "All training jobs failed. Please take a look at the training jobs failures to get more details."
_NO_OBJECTIVE = (
    f"No objective metrics found after running {_WITHOUT_OBJECTIVE} training jobs. Please ensure that the custom "
    "algorithm is emitting the objective metric as defined by the regular expression provided."
)
_RETRYABLE = ("CapacityError", "InternalServerError")
_STATUS_COUNTERS = ("Completed", "InProgress", "RetryableError", "NonRetryableError", "Stopped")
_OBJECTIVE_COUNTERS = ("Succeeded", "Pending", "Failed")

Create = Callable[[Mapping[str, Any], str], TrainingJob]
"""Creates a training job of a request and the ARN of its tuning job."""


@dataclass(frozen=True)
class Trial:
    """One training job of a tuning job, with its searched values."""

    job: TrainingJob
    values: Mapping[str, str]

    def objective(self, name: str) -> float | None:
        """Return the last value of the objective in the job's log, or None."""
        found = self.job.metrics.get(name)
        return None if found is None else found[0]


@dataclass
class TuningJob:
    """One tuning job. `advance` moves it on; thread-safe.

    Attributes:
        request: The CreateHyperParameterTuningJob request.
        clock: Callback that returns the time in seconds since the epoch.
        create: Creates a training job.
        status: HyperParameterTuningJobStatus.
        name: HyperParameterTuningJobName.
        arn: HyperParameterTuningJobArn.
        tags: Its tags, which its training jobs get, too.
    """

    request: Mapping[str, Any]
    clock: Clock
    create: Create
    status: str = "InProgress"
    _trials: list[Trial] = field(default_factory=list)
    _failure: str = ""

    def __post_init__(self) -> None:
        self.name = str(self.request["HyperParameterTuningJobName"])
        self.arn = arn_of("hyper-parameter-tuning-job", self.name)
        self.tags = list(self.request.get("Tags", ()))
        self._config = self.request["HyperParameterTuningJobConfig"]
        self._definition = self.request["TrainingJobDefinition"]
        self._ranges = self._config["ParameterRanges"]
        self._source = random.Random(self._config.get("RandomSeed"))  # noqa: S311 (a search, not a secret)
        self._names = random.Random()  # noqa: S311 (names of jobs)
        self._grid = grid(self._ranges) if self._config["Strategy"] == "Grid" else None
        self._lock = threading.RLock()
        self.created = self.modified = self.clock()
        self.ended: float | None = None

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.status in FINAL

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Its trials, oldest first."""
        with self._lock:
            return tuple(self._trials)

    def stop(self) -> None:
        """Stop the running trials and start no further ones."""
        with self._lock:
            if not self.is_final:
                self.status = "Stopping"
                self.modified = self.clock()
                self._stop_trials()

    def advance(self) -> None:
        """Start trials while there is room, and end when the last one has ended."""
        with self._lock:
            if self.is_final:
                return
            running = sum(not trial.job.is_final for trial in self._trials)
            limits = self._config["ResourceLimits"]
            runtime = limits.get("MaxRuntimeInSeconds")
            if (
                self.status == "InProgress"
                and runtime is not None
                and self.clock() - self.created >= runtime
            ):
                self.stop()
            if self.status == "InProgress" and not self._failure and self._lacks_objectives():
                self._failure = _NO_OBJECTIVE
                self._stop_trials()
            while self._may_start() and running < limits["MaxParallelTrainingJobs"]:
                self._start()
                running += 1
            if running == 0:
                self._end()

    @property
    def _most(self) -> int:
        most = self._config["ResourceLimits"].get("MaxNumberOfTrainingJobs")
        return len(self._grid or ()) if most is None else int(most)

    def _may_start(self) -> bool:
        return self.status == "InProgress" and not self._failure and len(self._trials) < self._most

    def _lacks_objectives(self) -> bool:
        ended = [trial for trial in self._trials if trial.job.status == "Completed"]
        return len(ended) >= _WITHOUT_OBJECTIVE and all(
            self._objective_status(each) == "Failed" for each in ended
        )

    def _stop_trials(self) -> None:
        for trial in self._trials:
            trial.job.is_stop_requested.set()

    def _next_values(self) -> Mapping[str, str]:
        if self._grid is None:
            return sample(self._ranges, self._source)
        return self._grid[len(self._trials)]

    def _start(self) -> None:
        values = self._next_values()
        name = f"{self.name}-{len(self._trials) + 1:03d}-{self._names.getrandbits(32):08x}"
        try:
            job = self.create(training_request(self.request, name, values), self.arn)
        except ServiceError as error:
            # Its role or input has been deleted.
            self._failure = error.message
            return
        self._trials.append(Trial(job, values))
        self.modified = self.clock()

    def _end(self) -> None:
        if self.status == "Stopping":
            self.status = "Stopped"
        else:
            if {trial.job.status for trial in self._trials} == {"Failed"}:
                self._failure = self._failure or _ALL_FAILED
            self.status = "Failed" if self._failure else "Completed"
        self.ended = self.modified = self.clock()

    def _objective_status(self, trial: Trial) -> str:
        if not trial.job.is_final:
            return "Pending"
        has_ended = trial.job.status in ("Completed", "Stopped")
        if has_ended and trial.objective(self._objective["MetricName"]) is not None:
            return "Succeeded"
        return "Failed"

    @property
    def _objective(self) -> Mapping[str, str]:
        return dict(self._config["HyperParameterTuningJobObjective"])

    def trial_summary(self, trial: Trial) -> dict[str, Any]:
        """Return a trial's entry in ListTrainingJobsForHyperParameterTuningJob."""
        job = trial.job
        value = trial.objective(self._objective["MetricName"])
        fields = {
            "TrainingJobName": job.name,
            "TrainingJobArn": job.arn,
            "CreationTime": job.created,
            "TrainingStartTime": job.started,
            "TrainingEndTime": job.ended,
            "TrainingJobStatus": job.status,
            "TunedHyperParameters": dict(trial.values),
            "FailureReason": job.failure or None,
            "ObjectiveStatus": self._objective_status(trial),
        }
        if value is not None and job.is_final:
            fields[OBJECTIVE_METRIC] = {**self._objective, "Value": value}
        return without_none(fields)

    def summary(self) -> dict[str, Any]:
        """Return its entry in ListHyperParameterTuningJobs."""
        with self._lock:
            fields = {
                "HyperParameterTuningJobName": self.name,
                "HyperParameterTuningJobArn": self.arn,
                "HyperParameterTuningJobStatus": self.status,
                "Strategy": self._config["Strategy"],
                "CreationTime": self.created,
                "HyperParameterTuningEndTime": self.ended,
                "LastModifiedTime": self.modified,
                "ResourceLimits": self._config["ResourceLimits"],
                **self._counters(),
            }
            return without_none(fields)

    def describe(self) -> dict[str, Any]:
        """Return the response to DescribeHyperParameterTuningJob."""
        with self._lock:
            best = self._best()
            seconds = sum(trial.job.training_seconds for trial in self._trials)
            fields = {
                **{
                    name: value
                    for name, value in self.summary().items()
                    if name not in ("Strategy", "ResourceLimits")
                },
                "HyperParameterTuningJobConfig": self._config,
                "TrainingJobDefinition": self._definition,
                "BestTrainingJob": None if best is None else self.trial_summary(best),
                "FailureReason": self._failure or None,
                "ConsumedResources": {"RuntimeInSeconds": round(seconds)},
            }
            return without_none(fields)

    def _best(self) -> Trial | None:
        name = self._objective["MetricName"]
        sign = 1 if self._objective["Type"] == "Minimize" else -1
        found = [each for each in self._trials if self._objective_status(each) == "Succeeded"]
        return min(found, key=lambda each: sign * (each.objective(name) or 0.0), default=None)

    def _counters(self) -> dict[str, dict[str, int]]:
        statuses = Counter(_counted_as(trial.job) for trial in self._trials)
        objectives = Counter(map(self._objective_status, self._trials))
        return {
            "TrainingJobStatusCounters": {name: statuses[name] for name in _STATUS_COUNTERS},
            "ObjectiveStatusCounters": {name: objectives[name] for name in _OBJECTIVE_COUNTERS},
        }


def training_request(
    request: Mapping[str, Any], name: str, values: Mapping[str, str]
) -> dict[str, Any]:
    """Return the CreateTrainingJob request of a trial of a tuning job's `request`, with searched `values`."""
    definition = dict(request["TrainingJobDefinition"])
    objective = request["HyperParameterTuningJobConfig"]["HyperParameterTuningJobObjective"][
        "MetricName"
    ]
    static = definition.pop("StaticHyperParameters", {})
    resources = (
        definition.pop("HyperParameterTuningResourceConfig", None) or definition["ResourceConfig"]
    )
    return {
        **{
            name_: value
            for name_, value in definition.items()
            if name_ not in ("DefinitionName", "ResourceConfig")
        },
        "TrainingJobName": name,
        "HyperParameters": {**static, **values, OBJECTIVE_HYPERPARAMETER: objective},
        "ResourceConfig": resources,
        **({"Tags": request["Tags"]} if request.get("Tags") else {}),
    }


def _counted_as(job: TrainingJob) -> str:
    """Return the counter of TrainingJobStatusCounters that counts a job."""
    if job.status == "Failed":
        return "RetryableError" if job.failure.startswith(_RETRYABLE) else "NonRetryableError"
    return job.status if job.is_final else "InProgress"
