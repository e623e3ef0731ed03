"""SageMaker's operations on tuning jobs: each takes a request document and returns a response document."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.sandbox.request_validation import ServiceError, check_model, validation_error
from cloudtrain.backends.sandbox.training_job import Clock
from cloudtrain.backends.sandbox.training_job_operations import TrainingJobs, page_of
from cloudtrain.backends.sandbox.tuning_job import Trial, TuningJob, training_request
from cloudtrain.backends.sandbox.tuning_search import check_ranges, grid
from cloudtrain.catalog.service_limits import TUNING_JOB

Document = Mapping[str, Any]
_ARN_PART = ":hyper-parameter-tuning-job/"
_TAG_OPERATIONS = ("ListTags", "AddTags", "DeleteTags")
_SCHEDULE_SECONDS = 0.1
_SORT_FIELDS = {
    "Name": "HyperParameterTuningJobName",
    "CreationTime": "CreationTime",
    "Status": "HyperParameterTuningJobStatus",
}
_TRIAL_SORT_FIELDS = {"Name": "TrainingJobName", "CreationTime": "CreationTime", "Status": "TrainingJobStatus"}
_NOT_SUPPORTED = ("TrainingJobDefinitions", "WarmStartConfig", "Autotune")
_NOT_SUPPORTED_CONFIG = ("TuningJobCompletionCriteria",)


class TuningJobs:
    """The tuning jobs of an account.

    Args:
        region: Its region.
        clock: Callback that returns the time in seconds since the epoch.
        jobs: The account's training jobs, to which those of the tuning jobs are added.
    """

    def __init__(self, region: str, clock: Clock, jobs: TrainingJobs) -> None:
        self._region = region
        self._clock = clock
        self._training_jobs = jobs
        self._lock = threading.Lock()
        self._jobs: dict[str, TuningJob] = {}
        self._operations = {
            "CreateHyperParameterTuningJob": self._create,
            "DescribeHyperParameterTuningJob": lambda request: self._find(request).describe(),
            "StopHyperParameterTuningJob": self._stop,
            "ListHyperParameterTuningJobs": self._list,
            "ListTrainingJobsForHyperParameterTuningJob": self._list_trials,
            "ListTags": self._list_tags,
        }

    def start_scheduler(self, is_ending: threading.Event) -> None:
        """Start the thread that advances the tuning jobs until the sandbox ends."""
        threading.Thread(target=self._schedule, args=(is_ending,), name="tuning-jobs", daemon=True).start()

    def _schedule(self, is_ending: threading.Event) -> None:
        while not is_ending.wait(_SCHEDULE_SECONDS):
            for job in self._all():
                try:
                    job.advance()
                except Exception:  # noqa: BLE001 (one job must not stop the others)
                    traceback.print_exc()

    def can_handle(self, operation: str, document: Document) -> bool:
        """Whether an operation concerns tuning jobs."""
        if operation in _TAG_OPERATIONS:
            return _ARN_PART in str(document.get("ResourceArn", ""))
        return operation in self._operations

    def handle(self, operation: str, document: Document) -> Document:
        """Execute an operation; return its response.

        Raises:
            ServiceError: SageMaker would reject the request, or the sandbox does not support the operation.
        """
        if operation not in self._operations:
            raise validation_error(f"cloudtrain sandbox: {operation} is not supported for tuning jobs")
        return self._operations[operation](document)

    def _create(self, request: Document) -> Document:
        check_model(request, TUNING_JOB)
        for message in _check(request):
            raise validation_error(message)
        name = str(request["HyperParameterTuningJobName"])
        self._training_jobs.check(training_request(request, f"{name}-001-00000000", {}))
        with self._lock:
            if name in self._jobs:
                raise ServiceError(
                    "ResourceInUse",
                    "Hyper parameter tuning job names must be unique within an AWS account and region, and one of this "
                    f"name already exists ({self._jobs[name].arn})",
                )
            job = self._jobs[name] = TuningJob(
                request,
                self._region,
                self._clock,
                create=lambda each, arn: self._training_jobs.create(each, tuning_arn=arn),
            )
        return {"HyperParameterTuningJobArn": job.arn}

    def _stop(self, request: Document) -> Document:
        job = self._find(request)
        if job.is_final:
            raise validation_error(f"The request was rejected because the tuning job is in status {job.status}.")
        job.stop()
        return {}

    def _find(self, request: Document) -> TuningJob:
        name = str(request.get("HyperParameterTuningJobName"))
        job = self._jobs.get(name)
        if job is None:  # not a ValidationException, as for training jobs (botocore's model)
            raise ServiceError("ResourceNotFound", f"Amazon SageMaker can't find a tuning job with name {name}")
        return job

    def _all(self) -> list[TuningJob]:
        with self._lock:
            return list(self._jobs.values())

    def _list(self, request: Document) -> Document:
        summaries = [job.summary() for job in self._all() if _is_wanted(job, request)]
        field = _SORT_FIELDS[request.get("SortBy", "Name")]
        is_descending = request.get("SortOrder", "Ascending") == "Descending"
        page, more = page_of(summaries, request, field, is_descending=is_descending, name=_SORT_FIELDS["Name"])
        return {"HyperParameterTuningJobSummaries": page, **more}

    def _list_trials(self, request: Document) -> Document:
        job = self._find(request)
        wanted, by = request.get("StatusEquals"), request.get("SortBy", "Name")
        found = [each for each in job.trials if wanted in (None, each.job.status)]
        if by == "FinalObjectiveMetricValue":  # AWS returns only the jobs that have a value
            return self._list_by_value(job, found, request)
        summaries = [job.trial_summary(each) for each in found]
        is_descending = request.get("SortOrder", "Ascending") == "Descending"
        page, more = page_of(summaries, request, _TRIAL_SORT_FIELDS[by], is_descending=is_descending)
        return {"TrainingJobSummaries": page, **more}

    def _list_by_value(self, job: TuningJob, found: list[Trial], request: Document) -> Document:
        key, metric = "Value", "FinalHyperParameterTuningJobObjectiveMetric"
        summaries = [job.trial_summary(each) for each in found]
        with_values = [{**each, key: each[metric]["Value"]} for each in summaries if metric in each]
        is_descending = request.get("SortOrder", "Ascending") == "Descending"
        page, more = page_of(with_values, request, key, is_descending=is_descending)
        return {"TrainingJobSummaries": [{k: v for k, v in each.items() if k != key} for each in page], **more}

    def _list_tags(self, request: Document) -> Document:
        name = str(request["ResourceArn"]).partition(_ARN_PART)[2]
        return {"Tags": self._find({"HyperParameterTuningJobName": name}).tags}


def _check(request: Document) -> Iterator[str]:
    """Yield messages about mistakes that the model does not find, and about features that only the sandbox lacks."""
    config = request["HyperParameterTuningJobConfig"]
    for name in [*_NOT_SUPPORTED, *_NOT_SUPPORTED_CONFIG]:
        if name in request or name in config:
            yield f"cloudtrain sandbox: {name} is not supported"
    if "TrainingJobDefinition" not in request:
        yield "Exactly one of TrainingJobDefinition and TrainingJobDefinitions must be specified"
        return
    definition, ranges = request["TrainingJobDefinition"], config.get("ParameterRanges", {})
    if "AutoParameters" in ranges:
        yield "cloudtrain sandbox: AutoParameters are not supported"
    resources = definition.get("HyperParameterTuningResourceConfig", {})
    if ("ResourceConfig" in definition) == bool(resources):
        yield "Exactly one of ResourceConfig and HyperParameterTuningResourceConfig must be specified"
    if "InstanceConfigs" in resources:
        yield "cloudtrain sandbox: InstanceConfigs are not supported"
    objective = config.get("HyperParameterTuningJobObjective")
    metrics = [each["Name"] for each in definition["AlgorithmSpecification"].get("MetricDefinitions", ())]
    if objective is None:
        yield "HyperParameterTuningJobObjective must be specified"
    elif objective["MetricName"] not in metrics:
        yield f"The objective metric {objective['MetricName']} is not defined in MetricDefinitions"
    yield from check_ranges(ranges, definition.get("StaticHyperParameters", {}), config["Strategy"])
    yield from _check_counts(config, ranges)


def _check_counts(config: Document, ranges: Document) -> Iterator[str]:
    most = config["ResourceLimits"].get("MaxNumberOfTrainingJobs")
    if config["Strategy"] == "Grid":
        combinations = len(grid(ranges))
        if most not in (None, combinations):
            yield f"MaxNumberOfTrainingJobs must equal the number of combinations of the grid, {combinations}"
    elif most is None:
        yield "MaxNumberOfTrainingJobs must be specified"
    if most is not None and config["ResourceLimits"]["MaxParallelTrainingJobs"] > most:
        yield "MaxParallelTrainingJobs must not be greater than MaxNumberOfTrainingJobs"


def _is_wanted(job: TuningJob, request: Document) -> bool:
    for name, moment in (("CreationTime", job.created), ("LastModifiedTime", job.modified)):
        if f"{name}After" in request and not moment > request[f"{name}After"]:
            return False
        if f"{name}Before" in request and not moment < request[f"{name}Before"]:
            return False
    if request.get("StatusEquals") not in (None, job.status):
        return False
    return str(request.get("NameContains", "")).lower() in job.name.lower()
