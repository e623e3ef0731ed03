"""SageMaker's operations on tuning jobs: each takes a request document and returns a response document."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from cloudtrain.backends.sandbox.request_validation import check_model, validation_error
from cloudtrain.backends.sandbox.resources import Document, Operations, Resources, page_of
from cloudtrain.backends.sandbox.training_job import Clock
from cloudtrain.backends.sandbox.training_job_operations import TrainingJobs
from cloudtrain.backends.sandbox.tuning_job import OBJECTIVE_METRIC, TuningJob, training_request
from cloudtrain.backends.sandbox.tuning_search import check_ranges, grid
from cloudtrain.catalog.service_limits import TUNING_JOB

_TAKEN = (
    "Hyper parameter tuning job names must be unique within an AWS account and region, and one of this name already "
    "exists ({arn})"
)
_NOT_SUPPORTED = ("TrainingJobDefinitions", "WarmStartConfig", "Autotune")
_NOT_SUPPORTED_CONFIG = ("TuningJobCompletionCriteria",)


class TuningJobs:
    """The tuning jobs of an account.

    Args:
        clock: Callback that returns the time in seconds since the epoch.
        training_jobs: The account's training jobs, to which those of the tuning jobs are added.
    """

    def __init__(self, clock: Clock, training_jobs: TrainingJobs) -> None:
        self._clock = clock
        self._training_jobs = training_jobs
        self.jobs: Resources[TuningJob] = Resources(
            "HyperParameterTuningJob",
            "hyper parameter tuning job",
            taken=("ResourceInUse", _TAKEN),
            # Not a ValidationException, as for training jobs (botocore's model).
            missing=(
                "ResourceNotFound",
                "Amazon SageMaker can't find a tuning job with name {name}",
            ),
        )
        self.operations: Operations = {
            "CreateHyperParameterTuningJob": self._create,
            "DescribeHyperParameterTuningJob": lambda request: self.jobs.find(request).describe(),
            "StopHyperParameterTuningJob": self._stop,
            "ListHyperParameterTuningJobs": self._list,
            "ListTrainingJobsForHyperParameterTuningJob": self._list_trials,
        }

    def advance(self) -> None:
        """Start trials of the tuning jobs, and end those whose trials have ended."""
        for job in self.jobs.all():
            try:
                job.advance()
            except Exception:  # noqa: BLE001 (one job must not stop the others)
                traceback.print_exc()

    def _create(self, request: Document) -> Document:
        check_model(request, TUNING_JOB)
        for message in _check(request):
            raise validation_error(message)
        name = str(request["HyperParameterTuningJobName"])
        self._training_jobs.check(training_request(request, f"{name}-001-00000000", {}))
        job = TuningJob(
            request,
            self._clock,
            create=lambda each, arn: self._training_jobs.create(each, tuning_arn=arn),
        )
        return {"HyperParameterTuningJobArn": self.jobs.add(job).arn}

    def _stop(self, request: Document) -> Document:
        job = self.jobs.find(request)
        if job.is_final:
            raise validation_error(
                f"The request was rejected because the tuning job is in status {job.status}."
            )
        job.stop()
        return {}

    def _list(self, request: Document) -> Document:
        status = request.get("StatusEquals")
        summaries = [job.summary() for job in self.jobs.all() if status in (None, job.status)]
        page, more = self.jobs.page(summaries, request, "Name Ascending")
        return {"HyperParameterTuningJobSummaries": page, **more}

    def _list_trials(self, request: Document) -> Document:
        job = self.jobs.find(request)
        status = request.get("StatusEquals")
        found = [
            job.trial_summary(each) for each in job.trials if status in (None, each.job.status)
        ]
        by_value = "FinalObjectiveMetricValue"
        values = {
            each["TrainingJobName"]: each[OBJECTIVE_METRIC]["Value"]
            for each in found
            if OBJECTIVE_METRIC in each
        }
        # AWS returns only the jobs that have a value.
        if request.get("SortBy") == by_value:
            found = [
                {**each, by_value: values[name]}
                for each in found
                if (name := each["TrainingJobName"]) in values
            ]
        page, more = page_of(found, request, "TrainingJob", "Name Ascending")
        summaries = [
            {name: value for name, value in each.items() if name != by_value} for each in page
        ]
        return {"TrainingJobSummaries": summaries, **more}


def _check(request: Document) -> Iterator[str]:
    """Yield messages about mistakes that the model does not find, and about features that only the sandbox lacks."""
    config = request["HyperParameterTuningJobConfig"]
    for name in [*_NOT_SUPPORTED, *_NOT_SUPPORTED_CONFIG]:
        if name in request or name in config:
            yield f"cloudtrain sandbox: {name} is not supported"
    if "TrainingJobDefinition" not in request:
        yield "Exactly one of TrainingJobDefinition and TrainingJobDefinitions must be specified"
        return
    definition = request["TrainingJobDefinition"]
    ranges = config.get("ParameterRanges", {})
    if "AutoParameters" in ranges:
        yield "cloudtrain sandbox: AutoParameters are not supported"
    resources = definition.get("HyperParameterTuningResourceConfig", {})
    if ("ResourceConfig" in definition) == bool(resources):
        yield "Exactly one of ResourceConfig and HyperParameterTuningResourceConfig must be specified"
    if "InstanceConfigs" in resources:
        yield "cloudtrain sandbox: InstanceConfigs are not supported"
    objective = config.get("HyperParameterTuningJobObjective")
    metrics = [
        each["Name"] for each in definition["AlgorithmSpecification"].get("MetricDefinitions", ())
    ]
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
