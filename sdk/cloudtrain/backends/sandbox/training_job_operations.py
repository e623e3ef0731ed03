"""SageMaker's operations on training jobs: each takes a request document and returns a response document."""

from __future__ import annotations

import base64
import json
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.aws.s3_download import find_objects
from cloudtrain.backends.sandbox.file_systems import mounted_folder
from cloudtrain.backends.sandbox.request_validation import (
    ServiceError,
    check_create,
    check_role,
    missing_input_error,
    validation_error,
)
from cloudtrain.backends.sandbox.training_job import Clock, TrainingJob
from cloudtrain.backends.sandbox.training_plans import check_plans, describe_plan, plans_of
from cloudtrain.catalog.service_limits import limit_of
from cloudtrain_runtime.contract.strict_json import dump_json

Document = Mapping[str, Any]
_ARN_PART = ":training-job/"
_TAG_OPERATIONS = ("ListTags", "AddTags", "DeleteTags")
PAGE = 10  # default of MaxResults, API reference of ListTrainingJobs
_MAX_PAGE = 100
_SORT_FIELDS = {"Name": "TrainingJobName", "CreationTime": "CreationTime", "Status": "TrainingJobStatus"}
_ONLY_DESCRIBED = ("MlflowConfig", "ProfilerRuleConfigurations", "RemoteDebugConfig", "InfraCheckConfig")
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
        region: Its region.
        clock: Callback that returns the time in seconds since the epoch.
        on_create: Called with each new job; it starts the job.
        get_trust_policy: Callback that returns the trust policy (JSON) of a role ARN; None if the role does not exist.
        s3: boto3 client that checks whether inputs exist.
        file_systems: Folder of the file systems that jobs mount.
    """

    def __init__(
        self,
        region: str,
        clock: Clock,
        *,
        on_create: Callable[[TrainingJob], None],
        get_trust_policy: Callable[[str], str | None],
        s3: Any,
        file_systems: Path,
    ) -> None:
        self._region = region
        self._clock = clock
        self._on_create = on_create
        self._get_trust_policy = get_trust_policy
        self._s3 = s3
        self._file_systems = file_systems
        self._lock = threading.Lock()
        self._jobs: dict[str, TrainingJob] = {}
        self._operations: Mapping[str, Callable[[Document], Document]] = {
            "CreateTrainingJob": lambda request: {"TrainingJobArn": self.create(request).arn},
            "DescribeTrainingJob": lambda request: self._find(request).describe(),
            "StopTrainingJob": self._stop,
            "UpdateTrainingJob": self._update,
            "ListTrainingJobs": self._list,
            "Search": self._search,
            "ListTags": self._list_tags,
            "DescribeTrainingPlan": lambda request: describe_plan(request, region, clock(), self._all()),
        }

    def can_handle(self, operation: str, document: Document) -> bool:
        """Whether an operation concerns training jobs."""
        if operation in _TAG_OPERATIONS:
            return _ARN_PART in str(document.get("ResourceArn", ""))
        if operation == "Search":
            return document.get("Resource") == "TrainingJob"
        return operation in self._operations

    def handle(self, operation: str, document: Document) -> Document:
        """Execute an operation; return its response.

        Raises:
            ServiceError: SageMaker would reject the request, or the sandbox does not support the operation.
        """
        if operation not in self._operations:
            raise validation_error(f"cloudtrain sandbox: {operation} is not supported for training jobs")
        return self._operations[operation](document)

    def create(self, request: Document, *, tuning_arn: str | None = None) -> TrainingJob:
        """Validate a request and start its job; `tuning_arn` is the ARN of the tuning job that creates it.

        Raises:
            ServiceError: SageMaker would reject the request.
        """
        check_create(request)
        name = str(request["TrainingJobName"])
        self._refuse_duplicate(name)
        self._check_account(request)
        with self._lock:
            self._refuse_duplicate(name)
            job = self._jobs[name] = TrainingJob(request, self._region, self._clock, tuning_arn)
        self._on_create(job)
        return job

    def check(self, request: Document) -> None:
        """Validate a request without starting its job.

        Raises:
            ServiceError: SageMaker would reject the request.
        """
        check_create(request)
        self._check_account(request)

    def _check_account(self, request: Document) -> None:
        check_role(request, self._get_trust_policy(str(request["RoleArn"])))
        check_plans(request, self._region)
        self._check_inputs(request)

    def _refuse_duplicate(self, name: str) -> None:
        if name in self._jobs:
            raise ServiceError(
                "ResourceInUse",
                "Training job names must be unique within an AWS account and region, and a training job with this name "
                f"already exists ({self._jobs[name].arn})",
            )

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
            raise missing_input_error(uri, self._region, str(request["RoleArn"]), cause)

    def _stop(self, request: Document) -> Document:
        job = self._find(request)
        if job.is_final:
            raise validation_error(f"The request was rejected because the training job is in status {job.status}.")
        job.is_stop_requested.set()
        return {}

    def _update(self, request: Document) -> Document:
        job = self._find(request)
        others = sorted(set(request) - {"TrainingJobName", "ResourceConfig"})
        if others or "ResourceConfig" not in request:
            fields = ", ".join(others) or "no field"
            raise validation_error(
                f"cloudtrain sandbox: UpdateTrainingJob supports only KeepAlivePeriodInSeconds, got {fields}"
            )
        seconds = request["ResourceConfig"]["KeepAlivePeriodInSeconds"]
        most = limit_of("ResourceConfig", "KeepAlivePeriodInSeconds")["max"]
        _check_size("resourceConfig.keepAlivePeriodInSeconds", seconds, 0, most)
        try:
            job.keep_pool_for(float(seconds))
        except ValueError as error:
            raise validation_error(f"The request was rejected because {error}.") from None
        return {"TrainingJobArn": job.arn}

    def _find(self, request: Document) -> TrainingJob:
        job = self._jobs.get(str(request.get("TrainingJobName")))
        if job is None:
            raise validation_error("Requested resource not found.")
        return job

    def _list(self, request: Document) -> Document:
        summaries = [job.summary() for job in self._all() if _is_wanted(job, request)]
        field = _SORT_FIELDS[request.get("SortBy", "CreationTime")]
        is_descending = request.get("SortOrder", "Ascending") == "Descending"
        page, more = page_of(summaries, request, field, is_descending=is_descending, default_size=PAGE)
        # StatusEquals filters only the jobs of the page. Source: API reference, ListTrainingJobs.
        status = request.get("StatusEquals")
        return {"TrainingJobSummaries": [job for job in page if status in (None, job["TrainingJobStatus"])], **more}

    def _search(self, request: Document) -> Document:
        expression = request.get("SearchExpression", {})
        if expression.get("Operator", "And") != "And" or set(expression) - {"Filters", "Operator"}:
            raise validation_error("cloudtrain sandbox: Search supports only Filters that are joined by And")
        filters = expression.get("Filters", ())
        records = (_record_of(job) for job in self._all())
        found = [record for record in records if all(_matches(record, each) for each in filters)]
        field = str(request.get("SortBy", "LastModifiedTime"))
        is_descending = request.get("SortOrder", "Descending") == "Descending"
        page, more = page_of(found, request, field, is_descending=is_descending, default_size=_MAX_PAGE)
        return {"Results": [{"TrainingJob": record} for record in page], **more}

    def _all(self) -> list[TrainingJob]:
        with self._lock:
            return list(self._jobs.values())

    def _list_tags(self, request: Document) -> Document:
        name = str(request["ResourceArn"]).partition(_ARN_PART)[2]
        return {"Tags": self._find({"TrainingJobName": name}).tags}


def _is_wanted(job: TrainingJob, request: Document) -> bool:
    times = (("CreationTime", job.created), ("LastModifiedTime", job.modified))
    for name, moment in times:
        if f"{name}After" in request and not moment > request[f"{name}After"]:
            return False
        if f"{name}Before" in request and not moment < request[f"{name}Before"]:
            return False
    if "WarmPoolStatusEquals" in request and job.pool_status != request["WarmPoolStatusEquals"]:
        return False
    plan = request.get("TrainingPlanArnEquals")
    if plan is not None and plan not in [arn for arn, _, _ in plans_of(job.request)]:
        return False
    return str(request.get("NameContains", "")).lower() in job.name.lower()


def page_of(
    items: Iterable[Document],
    request: Document,
    field: str,
    *,
    is_descending: bool,
    default_size: int = PAGE,
    name: str = "TrainingJobName",
) -> tuple[list[Document], Document]:
    """Return a sorted page of jobs, and the token of the next page if there is one.

    Jobs with equal values in `field` are sorted by their `name`. The token holds the sort key of the page's last job,
    so that new jobs do not shift the next page.
    """
    size = request.get("MaxResults", default_size)
    _check_size("maxResults", size, 1, _MAX_PAGE)

    def key(item: Document) -> list[Any]:
        return [item.get(field, 0), item[name]]

    found = sorted(items, key=key, reverse=is_descending)
    if "NextToken" in request:
        try:
            last = json.loads(base64.urlsafe_b64decode(request["NextToken"]))
        except ValueError:
            raise validation_error("Invalid NextToken") from None
        found = [item for item in found if (key(item) < last if is_descending else key(item) > last)]
    page = found[:size]
    if len(found) <= size:
        return page, {}
    return page, {"NextToken": base64.urlsafe_b64encode(dump_json(key(page[-1])).encode()).decode()}


def _record_of(job: TrainingJob) -> Document:
    """Return the search record of a job."""
    described = {name: value for name, value in job.describe().items() if name not in _ONLY_DESCRIBED}
    return {**described, "Tags": job.tags}


def _matches(record: Document, condition: Document) -> bool:
    name, wanted = str(condition["Name"]), str(condition.get("Value", ""))
    test = str(condition.get("Operator", "Equals"))
    actual = _property(record, name)
    if test == "Exists" or actual is None:
        return actual is not None
    is_number = isinstance(actual, int | float) and not isinstance(actual, bool)
    try:
        return _SEARCH_OPERATORS[test](*((actual, _number(name, wanted)) if is_number else (str(actual), wanted)))
    except (KeyError, TypeError):
        message = f"cloudtrain sandbox: the operator {test} is not supported for the property {name}"
        raise validation_error(message) from None


def _property(record: Document, name: str) -> Any:
    head, _, rest = name.partition(".")
    if head == "Tags" and rest:
        return next((tag["Value"] for tag in record["Tags"] if tag["Key"] == rest), None)
    if head == "HyperParameters" and rest:
        return record.get(head, {}).get(rest)
    value = record.get(name)
    if rest or isinstance(value, dict | list):
        raise validation_error(f"cloudtrain sandbox: Search does not support nested properties of {name}")
    return value


def _number(name: str, text: str) -> float:
    """Return the number in a text; for a property that is a time, seconds since the epoch."""
    try:
        if name.endswith("Time"):
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        return float(text)
    except ValueError:
        raise validation_error(f"Invalid value {text} for the property {name}") from None


def _check_size(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        side, bound = ("greater", least) if value < least else ("less", most)
        raise validation_error(
            f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy constraint: "
            f"Member must have value {side} than or equal to {bound}"
        )
