"""SageMaker's operations on training jobs: each takes a request document and returns a response document."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.s3_download import find_objects
from cloudtrain.backends.sandbox.file_systems import mounted_folder
from cloudtrain.backends.sandbox.process import REGION
from cloudtrain.backends.sandbox.request_validation import (
    check_create,
    check_role,
    missing_input_error,
    validation_error,
)
from cloudtrain.backends.sandbox.resources import (
    MAX_PAGE,
    Document,
    Operations,
    Resources,
    check_size,
    page_of,
)
from cloudtrain.backends.sandbox.training_job import Clock, TrainingJob
from cloudtrain.catalog.service_limits import limit_of

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_TAKEN = (
    "Training job names must be unique within an AWS account and region, and a training job with this name already "
    "exists ({arn})"
)
_ONLY_DESCRIBED = (
    "MlflowConfig",
    "ProfilerRuleConfigurations",
    "RemoteDebugConfig",
    "InfraCheckConfig",
)
"""Fields of DescribeTrainingJob that a search record lacks (botocore's model; a test compares)."""

_SEARCH_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "Equals": operator.eq,
    "Contains": operator.contains,
    "In": lambda actual, wanted: actual in wanted.split(","),
    "GreaterThanOrEqualTo": operator.ge,
    "LessThanOrEqualTo": operator.le,
}


class TrainingJobs:
    """The training jobs of an account.

    Args:
        clock: Callback that returns the time in seconds since the epoch.
        on_create: Called with each new job; it starts the job.
        get_trust_policy: Callback that returns the trust policy (JSON) of a role ARN; None if the role does not exist.
        s3: boto3 client that checks whether inputs exist.
        file_systems: Folder of the file systems that jobs mount.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        on_create: Callable[[TrainingJob], None],
        get_trust_policy: Callable[[str], str | None],
        s3: S3Client,
        file_systems: Path,
    ) -> None:
        self._clock = clock
        self._on_create = on_create
        self._get_trust_policy = get_trust_policy
        self._s3 = s3
        self._file_systems = file_systems
        self.jobs: Resources[TrainingJob] = Resources(
            "TrainingJob",
            "training job",
            taken=("ResourceInUse", _TAKEN),
            missing=("ValidationException", "Requested resource not found."),
        )
        self.operations: Operations = {
            "CreateTrainingJob": lambda request: {"TrainingJobArn": self.create(request).arn},
            "DescribeTrainingJob": lambda request: self.jobs.find(request).describe(),
            "StopTrainingJob": self.stop,
            "UpdateTrainingJob": self._update,
            "ListTrainingJobs": self._list,
            "Search": self._search,
        }

    def create(self, request: Document, *, tuning_arn: str | None = None) -> TrainingJob:
        """Validate a request and start its job; `tuning_arn` is the ARN of the tuning job that creates it.

        Raises:
            ServiceError: SageMaker would reject the request.
        """
        self.check(request)
        job = self.jobs.add(TrainingJob(request, self._clock, tuning_arn))
        self._on_create(job)
        return job

    def check(self, request: Document) -> None:
        """Validate a request without starting its job.

        Raises:
            ServiceError: SageMaker would reject the request.
        """
        check_create(request)
        self.jobs.check_free(str(request["TrainingJobName"]))
        check_role(request, self._get_trust_policy(str(request["RoleArn"])))
        self._check_inputs(request)

    def _check_inputs(self, request: Document) -> None:
        from botocore.exceptions import ClientError

        for channel in request.get("InputDataConfig", ()):
            if "FileSystemDataSource" in channel["DataSource"]:
                mounted_folder(self._file_systems, channel["DataSource"]["FileSystemDataSource"])
                continue
            uri = str(channel["DataSource"]["S3DataSource"]["S3Uri"])
            cause = "The S3 prefix has no objects."
            try:
                if next(find_objects(self._s3, uri), None) is not None:
                    continue
            except ClientError as error:
                cause = str(error.response["Error"]["Message"])
            raise missing_input_error(uri, REGION, str(request["RoleArn"]), cause)

    def stop(self, request: Document) -> Document:
        """Ask for the end of a job.

        Raises:
            ServiceError: There is no such job, or it has ended.
        """
        job = self.jobs.find(request)
        if job.is_final:
            raise validation_error(
                f"The request was rejected because the training job is in status {job.status}."
            )
        job.is_stop_requested.set()
        return {}

    def _update(self, request: Document) -> Document:
        job = self.jobs.find(request)
        others = sorted(set(request) - {"TrainingJobName", "ResourceConfig"})
        if others or "ResourceConfig" not in request:
            fields = ", ".join(others) or "no field"
            raise validation_error(
                f"cloudtrain sandbox: UpdateTrainingJob supports only KeepAlivePeriodInSeconds, got {fields}"
            )
        seconds = request["ResourceConfig"]["KeepAlivePeriodInSeconds"]
        most = limit_of("ResourceConfig", "KeepAlivePeriodInSeconds")["max"]
        check_size("resourceConfig.keepAlivePeriodInSeconds", seconds, 0, most)
        try:
            job.keep_pool_for(float(seconds))
        except ValueError as error:
            raise validation_error(f"The request was rejected because {error}.") from None
        return {"TrainingJobArn": job.arn}

    def _list(self, request: Document) -> Document:
        wanted = request.get("WarmPoolStatusEquals")
        summaries = [job.summary() for job in self.jobs.all() if wanted in (None, job.pool_status)]
        page, more = self.jobs.page(summaries, request, "CreationTime Ascending")
        # StatusEquals filters only the jobs of the page. Source: API reference, ListTrainingJobs.
        status = request.get("StatusEquals")
        return {
            "TrainingJobSummaries": [
                job for job in page if status in (None, job["TrainingJobStatus"])
            ],
            **more,
        }

    def _search(self, request: Document) -> Document:
        if request.get("Resource") != "TrainingJob":
            raise validation_error("cloudtrain sandbox: Search supports only training jobs")
        expression = request.get("SearchExpression", {})
        if expression.get("Operator", "And") != "And" or set(expression) - {"Filters", "Operator"}:
            raise validation_error(
                "cloudtrain sandbox: Search supports only Filters that are joined by And"
            )
        filters = expression.get("Filters", ())
        records = (_record_of(job) for job in self.jobs.all())
        found = [record for record in records if all(_matches(record, each) for each in filters)]
        page, more = page_of(found, request, "TrainingJob", "LastModifiedTime Descending", MAX_PAGE)
        return {"Results": [{"TrainingJob": record} for record in page], **more}


def _record_of(job: TrainingJob) -> Document:
    """Return the search record of a job."""
    described = {
        name: value for name, value in job.describe().items() if name not in _ONLY_DESCRIBED
    }
    return {**described, "Tags": job.tags}


def _matches(record: Document, condition: Document) -> bool:
    name = str(condition["Name"])
    wanted = str(condition.get("Value", ""))
    test = str(condition.get("Operator", "Equals"))
    actual = _property(record, name)
    if test == "Exists" or actual is None:
        return actual is not None
    is_number = isinstance(actual, int | float) and not isinstance(actual, bool)
    try:
        if is_number:
            return _SEARCH_OPERATORS[test](actual, _number(name, wanted))
        return _SEARCH_OPERATORS[test](str(actual), wanted)
    except (KeyError, TypeError):
        message = (
            f"cloudtrain sandbox: the operator {test} is not supported for the property {name}"
        )
        raise validation_error(message) from None


def _property(record: Document, name: str) -> Any:
    head, _, rest = name.partition(".")
    if head == "Tags" and rest:
        return next((tag["Value"] for tag in record["Tags"] if tag["Key"] == rest), None)
    if head == "HyperParameters" and rest:
        return record.get(head, {}).get(rest)
    value = record.get(name)
    if rest or isinstance(value, dict | list):
        raise validation_error(
            f"cloudtrain sandbox: Search does not support nested properties of {name}"
        )
    return value


def _number(name: str, text: str) -> float:
    """Return the number in a text; for a property that is a time, seconds since the epoch."""
    try:
        if name.endswith("Time"):
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        return float(text)
    except ValueError:
        raise validation_error(f"Invalid value {text} for the property {name}") from None
