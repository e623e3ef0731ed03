"""AWS Batch's operations on service jobs, with one job queue, first in, first out, whose jobs become training jobs.

Source: AWS Batch user guide, 2026-11. A job has one attempt; priority and timeout are stored and not used.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cloudtrain.backends.sandbox.fault_injection import FaultInjector
from cloudtrain.backends.sandbox.process import ACCOUNT, REGION
from cloudtrain.backends.sandbox.request_validation import ServiceError
from cloudtrain.backends.sandbox.resources import Document
from cloudtrain.backends.sandbox.training_job import Clock
from cloudtrain.backends.sandbox.training_job_operations import TrainingJobs
from cloudtrain.planning.service_job import SERVICE_JOB_TYPE, training_job_name
from cloudtrain_runtime.contract.strict_json import load_json

QUEUE = "cloudtrain-sandbox"

_WAITING = ("SUBMITTED", "RUNNABLE")
_FINAL = ("SUCCEEDED", "FAILED")
_RETRY_MILLISECONDS = 1000
"""Time for which a job without capacity blocks its queue before a retry; AWS does not document its own value."""
_MAX_RESULTS = 100
_MAX_SNAPSHOT_JOBS = 100
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_STATUS_PREFIX = "Received status from SageMaker: "
_TOO_LARGE = (
    "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE - Service environment(s) associated with the job queue cannot "
    "meet the capacity requirement of the job."
)
_NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - SageMaker has no capacity for the job at present."
)
_STATUS_BY_SECONDARY = {"Pending": "SCHEDULED", "Starting": "SCHEDULED", "Downloading": "STARTING"}
"""ServiceJobStatus by SecondaryStatus of a training job in progress; any other is RUNNING (same source)."""
_DESCRIBED = (
    "retryStrategy",
    "schedulingPriority",
    "serviceRequestPayload",
    "tags",
    "timeoutConfig",
)
"""Fields of a request that DescribeServiceJob returns as they are."""
_ARN = f"arn:aws:batch:{REGION}:{ACCOUNT}"
_QUEUE_ARN = f"{_ARN}:job-queue/{QUEUE}"
_ENVIRONMENT_ARN = f"{_ARN}:service-environment/{QUEUE}"


@dataclass
class _ServiceJob:
    """A service job. Times are milliseconds since the epoch."""

    id: str
    request: Document
    payload: Document
    created: int
    status: str = "SUBMITTED"
    reason: str = ""
    scheduled: int = 0
    started: int = 0
    stopped: int = 0
    retry_at: int = 0
    is_terminated: bool = False
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arn = f"{_ARN}:service-job/{self.id}"
        self.name = str(self.request["jobName"])
        resources = self.payload.get("ResourceConfig", {})
        preferences = resources.get("InstancePreferences") or [{}]
        self.instances = int(
            resources.get("InstanceCount") or preferences[0].get("InstanceCount") or 1
        )

    @property
    def is_started(self) -> bool:
        """Whether it has a training job that has not ended."""
        return self.status not in (*_WAITING, *_FINAL)

    @property
    def training_job(self) -> dict[str, str]:
        """Request for an operation on the training job of the latest attempt."""
        arn = str(self.attempts[-1]["serviceResourceId"]["value"])
        return {"TrainingJobName": arn.rpartition("/")[2]}

    def end(self, status: str, reason: str, now: int) -> None:
        self.status = status
        self.reason = reason
        self.stopped = now
        if self.attempts:
            self.attempts[-1].setdefault("stoppedAt", now)
            self.attempts[-1].setdefault("statusReason", reason)

    def summary(self) -> dict[str, Any]:
        """Return its entry in ListServiceJobs."""
        summary = {
            "jobId": self.id,
            "jobArn": self.arn,
            "jobName": self.name,
            "serviceJobType": SERVICE_JOB_TYPE,
            "status": self.status,
            "createdAt": self.created,
            "statusReason": self.reason,
            "scheduledAt": self.scheduled,
            "startedAt": self.started,
            "stoppedAt": self.stopped,
            "isTerminated": self.is_terminated,
        }
        if self.attempts:
            summary["latestAttempt"] = {"serviceResourceId": self.attempts[-1]["serviceResourceId"]}
        return {name: value for name, value in summary.items() if value}

    def describe(self) -> dict[str, Any]:
        """Return the response to DescribeServiceJob."""
        return {
            **{name: self.request[name] for name in _DESCRIBED if name in self.request},
            **self.summary(),
            "attempts": self.attempts,
            "jobQueue": _QUEUE_ARN,
            # Required by botocore's model.
            "startedAt": self.started,
            "isTerminated": self.is_terminated,
        }


class ServiceJobs:
    """The service jobs and the job queue of an account. The fault plan sets the capacity of the queue."""

    def __init__(self, jobs: TrainingJobs, faults: FaultInjector, clock: Clock) -> None:
        self._training = jobs
        self._faults = faults
        self._clock = clock
        self._lock = threading.RLock()
        self._jobs: dict[str, _ServiceJob] = {}

    def handle(self, operation: str, document: Document) -> Document:
        """Execute an operation; return its response.

        Raises:
            ServiceError: AWS Batch would reject the request, or the sandbox does not support the operation.
        """
        method = self.OPERATIONS.get(operation)
        if method is None:
            raise _client_error(f"cloudtrain sandbox: AWS Batch's {operation} is not supported")
        with self._lock:
            return method(self, document)

    def _describe(self, request: Document) -> Document:
        return self._find(request).describe()

    def _submit(self, request: Document) -> Document:
        _check(request)
        token = request.get("clientToken")
        if token and any(job.request.get("clientToken") == token for job in self._jobs.values()):
            raise _client_error(f"A request with the client token {token} was submitted already")
        try:
            payload = load_json(request["serviceRequestPayload"])
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            raise _client_error("serviceRequestPayload is not a JSON object")
        job = _ServiceJob(str(uuid.uuid4()), request, payload, self._now())
        self._jobs[job.id] = job
        return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}

    def _terminate(self, request: Document) -> Document:
        job = self._find(request)
        reason = str(request.get("reason") or "")
        if not reason:
            raise _client_error("reason must not be empty")
        if job.status not in _FINAL:
            job.is_terminated = True
            job.reason = reason
            if job.status in _WAITING:
                job.end("FAILED", reason, self._now())
            else:
                # The training job has just ended.
                with contextlib.suppress(ServiceError):
                    self._training.stop(job.training_job)
        return {}

    def _list(self, request: Document) -> Document:
        _check_queue(request)
        found = [job for job in reversed(self._jobs.values()) if _is_listed(job, request)]
        size = int(request.get("maxResults") or _MAX_RESULTS)
        begin = int(request.get("nextToken") or 0)
        page = found[begin : begin + size]
        more = {"nextToken": str(begin + size)} if len(found) > begin + size else {}
        return {"jobSummaryList": [job.summary() for job in page], **more}

    def _snapshot(self, request: Document) -> Document:
        _check_queue(request)
        waiting = self._waiting()[:_MAX_SNAPSHOT_JOBS]
        jobs = [{"jobArn": job.arn, "earliestTimeAtPosition": job.created} for job in waiting]
        return {"frontOfQueue": {"jobs": jobs, "lastUpdatedAt": self._now()}}

    def _describe_queues(self, request: Document) -> Document:
        if not _names(request.get("jobQueues"), _QUEUE_ARN):
            return {"jobQueues": []}
        queue = {
            "jobQueueName": QUEUE,
            "jobQueueArn": _QUEUE_ARN,
            "state": "ENABLED",
            "status": "VALID",
            "statusReason": "JobQueue Healthy",
            "priority": 1,
            "computeEnvironmentOrder": [],
            "serviceEnvironmentOrder": [{"order": 1, "serviceEnvironment": _ENVIRONMENT_ARN}],
            "jobQueueType": SERVICE_JOB_TYPE,
            "tags": {},
        }
        return {"jobQueues": [queue]}

    def _describe_environments(self, request: Document) -> Document:
        if not _names(request.get("serviceEnvironments"), _ENVIRONMENT_ARN):
            return {"serviceEnvironments": []}
        limit = {"capacityUnit": "NUM_INSTANCES", "maxCapacity": self._faults.plan.queue_instances}
        environment = {
            "serviceEnvironmentName": QUEUE,
            "serviceEnvironmentArn": _ENVIRONMENT_ARN,
            "serviceEnvironmentType": SERVICE_JOB_TYPE,
            "state": "ENABLED",
            "status": "VALID",
            "capacityLimits": [limit],
            "tags": {},
        }
        return {"serviceEnvironments": [environment]}

    def _find(self, request: Document) -> _ServiceJob:
        # The SageMaker SDK gives the ARN.
        job = self._jobs.get(str(request.get("jobId", "")).rpartition("/")[2])
        if job is None:
            raise _client_error(f"Service job {request.get('jobId')} not found.")
        return job

    def _now(self) -> int:
        return round(self._clock() * 1000)

    def schedule(self) -> None:
        """Update the jobs from their training jobs, then start the next ones."""
        with self._lock:
            for job in list(self._jobs.values()):
                if job.status == "SUBMITTED":
                    job.status = "RUNNABLE"
                elif job.is_started:
                    self._update_status(job)
            self._start_next()

    def _start_next(self) -> None:
        """Start the first jobs while capacity lasts; a job that does not fit blocks the jobs behind it."""
        capacity = self._faults.plan.queue_instances
        while waiting := self._waiting():
            job = waiting[0]
            if job.instances > capacity:
                job.reason = _TOO_LARGE
                return
            in_use = sum(each.instances for each in self._jobs.values() if each.is_started)
            if in_use + job.instances > capacity or job.retry_at > self._now():
                return
            self._start(job)

    def _waiting(self) -> list[_ServiceJob]:
        """Return the jobs that may start, in their order."""
        return [job for job in self._jobs.values() if job.status == "RUNNABLE"]

    def _start(self, job: _ServiceJob) -> None:
        name = training_job_name(
            str(job.payload.get("TrainingJobName", job.name)), uuid.uuid4().hex
        )
        tags = [{"Key": key, "Value": value} for key, value in job.request.get("tags", {}).items()]
        request = {**job.payload, "TrainingJobName": name, **({"Tags": tags} if tags else {})}
        job.reason = ""
        job.scheduled = self._now()
        try:
            arn = self._training.create(request).arn
        except (ServiceError, KeyError, TypeError) as error:
            cause = f"ValidationError: {error}"
            if isinstance(error, ServiceError):
                cause = f"{error.code}: {error.message}"
            job.end("FAILED", f"{_STATUS_PREFIX}{cause}", self._now())
            return
        job.status = "SCHEDULED"
        job.attempts.append({"serviceResourceId": {"name": "TrainingJobArn", "value": arn}})

    def _update_status(self, job: _ServiceJob) -> None:
        training_job = self._training.jobs.find(job.training_job)
        status = training_job.status
        now = self._now()
        if status in ("InProgress", "Stopping"):
            job.status = _STATUS_BY_SECONDARY.get(training_job.secondary, "RUNNING")
            if job.status == "RUNNING" and not job.attempts[-1].get("startedAt"):
                job.started = job.attempts[-1]["startedAt"] = now
        elif status == "Completed":
            job.end("SUCCEEDED", f"{_STATUS_PREFIX}Training job completed", now)
        elif job.is_terminated:
            job.end("FAILED", job.reason, now)
        elif training_job.failure.startswith("CapacityError"):
            # AWS Batch retries until there is capacity.
            job.attempts[-1].update(stoppedAt=now, statusReason=_NO_CAPACITY)
            job.status = "RUNNABLE"
            job.reason = _NO_CAPACITY
            job.retry_at = now + _RETRY_MILLISECONDS
        else:
            cause = training_job.failure or "Training job stopped"
            job.end("FAILED", f"{_STATUS_PREFIX}{cause}", now)

    OPERATIONS: ClassVar[Mapping[str, Callable[[ServiceJobs, Document], Document]]] = {
        "SubmitServiceJob": _submit,
        "DescribeServiceJob": _describe,
        "TerminateServiceJob": _terminate,
        "ListServiceJobs": _list,
        "GetJobQueueSnapshot": _snapshot,
        "DescribeJobQueues": _describe_queues,
        "DescribeServiceEnvironments": _describe_environments,
    }


PATHS = {f"/v1/{name.lower()}": name for name in ServiceJobs.OPERATIONS}
"""Operations by URL path (botocore's model; a test compares)."""


def _client_error(message: str) -> ServiceError:
    return ServiceError("ClientException", message)


def _is_listed(job: _ServiceJob, request: Document) -> bool:
    """Whether ListServiceJobs selects a job: by its filter, or by its status, which is RUNNING by default."""
    filters = request.get("filters")
    if not filters:
        return bool(job.status == (request.get("jobStatus") or "RUNNING"))
    name = filters[0]["name"]
    values = [str(value).lower() for value in filters[0]["values"]]
    if len(filters) == 1 and name == "JOB_NAME":
        own = job.name.lower()
        return any(
            own.startswith(value[:-1]) if value.endswith("*") else own == value for value in values
        )
    if len(filters) == 1 and name == "AFTER_CREATED_AT":
        return job.created > int(values[0])
    raise _client_error(
        "cloudtrain sandbox: ListServiceJobs supports one filter, JOB_NAME or AFTER_CREATED_AT"
    )


def _names(wanted: Sequence[str] | None, arn: str) -> bool:
    """Whether a request names something by its name or ARN; one without names means everything."""
    return not wanted or any(each in (arn, arn.rpartition("/")[2]) for each in wanted)


def _check_queue(request: Document) -> None:
    """Check that a request names the queue."""
    name = str(request.get("jobQueue", ""))
    if not name or not _names([name], _QUEUE_ARN):
        raise _client_error(f"JobQueue {name} not found.")


def _check(request: Document) -> None:
    """Validate AWS Batch's fields of a request."""
    for name in ("jobName", "jobQueue", "serviceJobType", "serviceRequestPayload"):
        if not request.get(name):
            raise _client_error(f"{name} must not be empty")
    if not _JOB_NAME.fullmatch(request["jobName"]):
        raise _client_error("Job name should match valid pattern")
    if request["serviceJobType"] != SERVICE_JOB_TYPE:
        raise _client_error(f"Service job type {request['serviceJobType']} is not valid")
    _check_queue(request)
    if "shareIdentifier" in request or "quotaShareName" in request:
        raise _client_error(f"cloudtrain sandbox: the queue {QUEUE} has no shares")
    if request.get("retryStrategy", {}).get("attempts", 1) != 1:
        raise _client_error("cloudtrain sandbox: a job in the queue has one attempt")
