"""SageMaker's operations on training jobs: each takes a request document and returns a response document."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.aws.s3_download import find_objects
from cloudtrain.backends.sandbox.request_validation import (
    ServiceError,
    check_create,
    check_role,
    missing_input_error,
    validation_error,
)
from cloudtrain.backends.sandbox.training_job import Clock, TrainingJob
from cloudtrain.backends.sandbox.training_job_search import search_jobs
from cloudtrain.catalog.service_limits import limit_of

Document = Mapping[str, Any]
_ARN_PART = ":training-job/"
_PAGE = 10  # default of MaxResults, API reference of ListTrainingJobs
_MAX_PAGE = 100
_SORT_KEYS: Mapping[str, Callable[[TrainingJob], Any]] = {
    "Name": lambda job: (job.name,),
    "CreationTime": lambda job: (job.created, job.name),
    "Status": lambda job: (job.status, job.name),
}


class TrainingJobs:
    """The training jobs of an account.

    Args:
        region: Its region.
        clock: Callback that returns the time in seconds since the epoch.
        on_create: Called with each new job; it starts the job.
        get_trust_policy: Callback that returns the trust policy (JSON) of a role ARN; None if the role does not exist.
        s3: boto3 client that checks whether inputs exist.
    """

    def __init__(
        self,
        region: str,
        clock: Clock,
        *,
        on_create: Callable[[TrainingJob], None],
        get_trust_policy: Callable[[str], str | None],
        s3: Any,
    ) -> None:
        self._region = region
        self._clock = clock
        self._on_create = on_create
        self._get_trust_policy = get_trust_policy
        self._s3 = s3
        self._lock = threading.Lock()
        self._jobs: dict[str, TrainingJob] = {}
        self._operations: Mapping[str, Callable[[Document], Document]] = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": self._describe,
            "StopTrainingJob": self._stop,
            "UpdateTrainingJob": self._update,
            "ListTrainingJobs": self._list,
            "Search": self._search,
            "ListTags": self._list_tags,
            "AddTags": self._add_tags,
            "DeleteTags": self._delete_tags,
        }

    def can_handle(self, operation: str, document: Document) -> bool:
        """Whether an operation concerns training jobs."""
        if operation in ("ListTags", "AddTags", "DeleteTags"):
            return _ARN_PART in str(document.get("ResourceArn", ""))
        if operation == "Search":
            return document.get("Resource") == "TrainingJob"
        return operation in self._operations

    def handle(self, operation: str, document: Document) -> Document:
        """Execute an operation; return its response.

        Raises:
            ServiceError: SageMaker would reject the request.
        """
        return self._operations[operation](document)

    def _create(self, request: Document) -> Document:
        check_create(request)
        name = str(request["TrainingJobName"])
        self._refuse_duplicate(name)
        check_role(request, self._get_trust_policy(str(request["RoleArn"])))
        self._check_inputs(request)
        with self._lock:
            self._refuse_duplicate(name)
            job = self._jobs[name] = TrainingJob(request, self._region, self._clock)
        self._on_create(job)
        return {"TrainingJobArn": job.arn}

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
            uri = str(channel["DataSource"]["S3DataSource"]["S3Uri"])
            cause = "The S3 prefix has no objects."
            try:
                if next(find_objects(self._s3, uri), None) is not None:
                    continue
            except ClientError as error:
                cause = str(error.response["Error"]["Message"])
            raise missing_input_error(uri, self._region, str(request["RoleArn"]), cause)

    def _describe(self, request: Document) -> Document:
        return self._find(request).describe()

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
        size = request.get("MaxResults", _PAGE)
        _check_size("maxResults", size, 1, _MAX_PAGE)
        key = _SORT_KEYS[request.get("SortBy", "CreationTime")]
        is_descending = request.get("SortOrder", "Ascending") == "Descending"
        with self._lock:
            jobs = list(self._jobs.values())
        found = sorted((job for job in jobs if _is_wanted(job, request)), key=key, reverse=is_descending)
        # The token holds the last job of the page, so that new jobs do not shift the next page.
        last_name = _read_token(request.get("NextToken"))
        if last_name is not None:
            last = self._jobs.get(last_name)
            if last is None:
                raise validation_error("Invalid NextToken")
            found = [job for job in found if (key(job) < key(last) if is_descending else key(job) > key(last))]
        page = found[:size]
        more = {"NextToken": _make_token(page[-1].name)} if len(found) > size else {}
        # StatusEquals filters only the jobs of the page. Source: API reference, ListTrainingJobs.
        status = request.get("StatusEquals")
        summaries = [job.summary() for job in page if status is None or job.status == status]
        return {"TrainingJobSummaries": summaries, **more}

    def _search(self, request: Document) -> Document:
        size = request.get("MaxResults", _MAX_PAGE)
        _check_size("maxResults", size, 1, _MAX_PAGE)
        with self._lock:
            jobs = list(self._jobs.values())
        records = search_jobs(jobs, request)
        last_name = _read_token(request.get("NextToken"))
        names = [record["TrainingJobName"] for record in records]
        if last_name is not None:
            if last_name not in names:
                raise validation_error("Invalid NextToken")
            records = records[names.index(last_name) + 1 :]
        page = records[:size]
        more = {"NextToken": _make_token(page[-1]["TrainingJobName"])} if len(records) > size else {}
        return {"Results": [{"TrainingJob": record} for record in page], **more}

    def _list_tags(self, request: Document) -> Document:
        return {"Tags": list(self._find_by_arn(request).tags)}

    def _add_tags(self, request: Document) -> Document:
        job = self._find_by_arn(request)
        added = {tag["Key"]: dict(tag) for tag in request["Tags"]}
        job.tags = [tag for tag in job.tags if tag["Key"] not in added] + list(added.values())
        return {"Tags": list(job.tags)}

    def _delete_tags(self, request: Document) -> Document:
        job = self._find_by_arn(request)
        job.tags = [tag for tag in job.tags if tag["Key"] not in request["TagKeys"]]
        return {}

    def _find_by_arn(self, request: Document) -> TrainingJob:
        name = str(request["ResourceArn"]).partition(_ARN_PART)[2]
        return self._find({"TrainingJobName": name})


def _is_wanted(job: TrainingJob, request: Document) -> bool:
    times = (("CreationTime", job.created), ("LastModifiedTime", job.modified))
    for name, moment in times:
        if f"{name}After" in request and not moment > request[f"{name}After"]:
            return False
        if f"{name}Before" in request and not moment < request[f"{name}Before"]:
            return False
    if "WarmPoolStatusEquals" in request and job.pool_status != request["WarmPoolStatusEquals"]:
        return False
    if "TrainingPlanArnEquals" in request:  # no job here has one
        return False
    return str(request.get("NameContains", "")).lower() in job.name.lower()


def _check_size(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        side, bound = ("greater", least) if value < least else ("less", most)
        raise validation_error(
            f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy constraint: "
            f"Member must have value {side} than or equal to {bound}"
        )


def _make_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _read_token(token: str | None) -> str | None:
    if token is None:
        return None
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except ValueError:
        raise validation_error("Invalid NextToken") from None
