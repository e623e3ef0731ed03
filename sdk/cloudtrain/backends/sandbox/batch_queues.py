"""AWS Batch's operations on service jobs, with three job queues whose jobs become training jobs.

`cloudtrain-sandbox` is first in, first out. `cloudtrain-sandbox-fair` has a fair-share policy: its jobs need a share
identifier and are ordered by the usage of their shares, then by priority. `cloudtrain-sandbox-quota` does the same with
quota shares of any name, and preempts a job for one with a higher priority in its share. Source: AWS Batch user guide,
2026-11. Quota shares have no capacity of their own, and a job's timeout is stored, and not enforced.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
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
FAIR_QUEUE = "cloudtrain-sandbox-fair"
QUOTA_QUEUE = "cloudtrain-sandbox-quota"
QUEUES = (QUEUE, FAIR_QUEUE, QUOTA_QUEUE)

_WAITING = ("SUBMITTED", "RUNNABLE")
_FINAL = ("SUCCEEDED", "FAILED")
_RETRY_MILLISECONDS = 1000
"""Time for which a job without capacity blocks its queue before a retry; AWS does not document its own value."""
_MAX_RESULTS = 100
_MAX_SNAPSHOT_JOBS = 100
_MAX_PRIORITY = 9999
_MAX_ATTEMPTS = 10
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_STATUS_PREFIX = "Received status from SageMaker: "
_TOO_LARGE = (
    "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE - Service environment(s) associated with the job queue cannot "
    "meet the capacity requirement of the job."
)
_NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - SageMaker has no capacity for the job at present."
)
# AWS does not document its own text.
_PREEMPTED = "Preempted by a job of a higher priority in its quota share."
_STATUS_BY_SECONDARY = {"Pending": "SCHEDULED", "Starting": "SCHEDULED", "Downloading": "STARTING"}
"""ServiceJobStatus by SecondaryStatus of a training job in progress; any other is RUNNING (same source)."""


@dataclass
class _ServiceJob:
    """A service job. Times are milliseconds since the epoch."""

    id: str
    queue: str
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
    is_preempted: bool = False
    failures: int = 0
    preempted: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arn = f"{_ARN}:service-job/{self.id}"
        self.name = str(self.request["jobName"])
        self.share = str(
            self.request.get("shareIdentifier") or self.request.get("quotaShareName") or ""
        )
        self.priority = int(self.request.get("schedulingPriority", 0))
        resources = self.payload.get("ResourceConfig", {})
        preferences = resources.get("InstancePreferences") or [{}]
        self.instances = int(
            resources.get("InstanceCount") or preferences[0].get("InstanceCount") or 1
        )

    @property
    def training_job(self) -> dict[str, str]:
        """Request for an operation on the training job of the latest attempt."""
        return {
            "TrainingJobName": str(self.attempts[-1]["serviceResourceId"]["value"]).rpartition("/")[
                2
            ]
        }

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
            **{name: self.request.get(name) for name in ("shareIdentifier", "quotaShareName")},
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
        fields = (
            "retryStrategy",
            "preemptionConfiguration",
            "schedulingPriority",
            "serviceRequestPayload",
        )
        preempted = {
            "preemptedAttemptCount": len(self.preempted),
            "recentPreemptedAttempts": self.preempted,
        }
        return {
            **({"preemptionSummary": preempted} if self.preempted else {}),
            **{
                name: self.request[name]
                for name in (*fields, "tags", "timeoutConfig")
                if name in self.request
            },
            **self.summary(),
            "attempts": self.attempts,
            "jobQueue": _queue_arn(self.queue),
            # Required by botocore's model.
            "startedAt": self.started,
            "isTerminated": self.is_terminated,
        }


class ServiceJobs:
    """The service jobs and job queues of an account. The fault plan sets the capacity of the queues."""

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
        queue = self._check(request)
        token = request.get("clientToken")
        if token and any(job.request.get("clientToken") == token for job in self._jobs.values()):
            raise _client_error(f"A request with the client token {token} was submitted already")
        try:
            payload = load_json(request["serviceRequestPayload"])
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            raise _client_error("serviceRequestPayload is not a JSON object")
        job = _ServiceJob(str(uuid.uuid4()), queue, request, payload, self._now())
        self._jobs[job.id] = job
        return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}

    def _check(self, request: Document) -> str:
        """Validate AWS Batch's fields of a request; return the queue's name."""
        for name in ("jobName", "jobQueue", "serviceJobType", "serviceRequestPayload"):
            if not request.get(name):
                raise _client_error(f"{name} must not be empty")
        if not _JOB_NAME.fullmatch(request["jobName"]):
            raise _client_error("Job name should match valid pattern")
        if request["serviceJobType"] != SERVICE_JOB_TYPE:
            raise _client_error(f"Service job type {request['serviceJobType']} is not valid")
        queue = _queue_name(request["jobQueue"])
        for policy, name, member in (
            (FAIR_QUEUE, "Share identifier", "shareIdentifier"),
            (QUOTA_QUEUE, "Quota share name", "quotaShareName"),
        ):
            if (queue == policy) != bool(request.get(member)):
                words = "must not be specified without"
                if queue == policy:
                    words = "must be specified when the job queue has"
                raise _client_error(f"{name} {words} its scheduling policy")
        if not 0 <= request.get("schedulingPriority", 0) <= _MAX_PRIORITY:
            raise _client_error("Scheduling priority must be between 0 and 9999")
        if not 1 <= request.get("retryStrategy", {}).get("attempts", 1) <= _MAX_ATTEMPTS:
            raise _client_error("Attempts must be between 1 and 10")
        return queue

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
        queue = _queue_name(request.get("jobQueue", ""))
        found = [
            job
            for job in reversed(self._jobs.values())
            if job.queue == queue and _is_listed(job, request)
        ]
        size = int(request.get("maxResults") or _MAX_RESULTS)
        begin = int(request.get("nextToken") or 0)
        page = found[begin : begin + size]
        more = {"nextToken": str(begin + size)} if len(found) > begin + size else {}
        return {"jobSummaryList": [job.summary() for job in page], **more}

    def _snapshot(self, request: Document) -> Document:
        waiting = self._in_order(_queue_name(request.get("jobQueue", "")))[:_MAX_SNAPSHOT_JOBS]
        jobs = [{"jobArn": job.arn, "earliestTimeAtPosition": job.created} for job in waiting]
        return {"frontOfQueue": {"jobs": jobs, "lastUpdatedAt": self._now()}}

    def _describe_queues(self, request: Document) -> Document:
        wanted = [name.rpartition("/")[2] for name in request.get("jobQueues") or QUEUES]
        return {"jobQueues": [_describe_queue(name) for name in QUEUES if name in wanted]}

    def _describe_environments(self, request: Document) -> Document:
        wanted = [name.rpartition("/")[2] for name in request.get("serviceEnvironments") or QUEUES]
        limits = [
            {"capacityUnit": "NUM_INSTANCES", "maxCapacity": self._faults.plan.queue_instances}
        ]
        found = [
            {
                "serviceEnvironmentName": name,
                "serviceEnvironmentArn": f"{_ARN}:service-environment/{name}",
                "serviceEnvironmentType": SERVICE_JOB_TYPE,
                "state": "ENABLED",
                "status": "VALID",
                "capacityLimits": limits,
                "tags": {},
            }
            for name in QUEUES
            if name in wanted
        ]
        return {"serviceEnvironments": found}

    def _find(self, request: Document) -> _ServiceJob:
        # The SageMaker SDK gives the ARN.
        job = self._jobs.get(str(request.get("jobId", "")).rpartition("/")[2])
        if job is None:
            raise _client_error(f"Service job {request.get('jobId')} not found.")
        return job

    def _now(self) -> int:
        return round(self._clock() * 1000)

    def schedule(self) -> None:
        """Update the jobs from their training jobs, then start the next jobs of each queue."""
        with self._lock:
            for job in list(self._jobs.values()):
                if job.status == "SUBMITTED":
                    job.status = "RUNNABLE"
                elif job.status not in (*_WAITING, *_FINAL):
                    self._update_status(job)
            for queue in QUEUES:
                self._start_next(queue)

    def _start_next(self, queue: str) -> None:
        """Start the first jobs of a queue while capacity lasts; a job that does not fit blocks the jobs behind it."""
        capacity = self._faults.plan.queue_instances
        while waiting := self._in_order(queue):
            job = waiting[0]
            if job.instances > capacity:
                job.reason = _TOO_LARGE
                return
            if (
                self._instances_in_use(queue).total() + job.instances > capacity
                or job.retry_at > self._now()
            ):
                self._preempt_for(job)
                return
            self._start(job)

    def _preempt_for(self, job: _ServiceJob) -> None:
        """Stop the job of the lowest priority in a quota share, for one of a higher priority that waits."""
        running = [
            each
            for each in self._jobs.values()
            if each.queue == QUOTA_QUEUE and each.share == job.share
        ]
        running = [each for each in running if each.status not in (*_WAITING, *_FINAL)]
        lowest = min(running, key=lambda each: each.priority, default=job)
        if lowest.priority < job.priority and not any(each.is_preempted for each in running):
            lowest.is_preempted = True
            # The training job has just ended.
            with contextlib.suppress(ServiceError):
                self._training.stop(lowest.training_job)

    def _in_order(self, queue: str) -> list[_ServiceJob]:
        waiting = [
            job for job in self._jobs.values() if job.queue == queue and job.status == "RUNNABLE"
        ]
        if queue == QUEUE:
            return waiting
        used = self._instances_in_use(queue)
        return sorted(waiting, key=lambda job: (used[job.share], -job.priority, job.created))

    def _instances_in_use(self, queue: str) -> Counter[str]:
        """Return the number of instances in use by share."""
        used: Counter[str] = Counter()
        for job in self._jobs.values():
            if job.queue == queue and job.status not in (*_WAITING, *_FINAL):
                used[job.share] += job.instances
        return used

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
        elif job.is_preempted and status == "Stopped":
            self._requeue_preempted(job, now)
        else:
            cause = training_job.failure or "Training job stopped"
            self._finish_attempt(job, cause, now, has_failed=status == "Failed")

    def _requeue_preempted(self, job: _ServiceJob, now: int) -> None:
        """Put a preempted job back into its queue, or end it when it may not be preempted again."""
        job.preempted.append({**job.attempts.pop(), "stoppedAt": now, "statusReason": _PREEMPTED})
        job.is_preempted = False
        limit = job.request.get("preemptionConfiguration", {}).get(
            "preemptionRetriesBeforeTermination"
        )
        if limit is not None and len(job.preempted) > limit:
            job.end("FAILED", _PREEMPTED, now)
        else:
            job.status = "RUNNABLE"
            job.reason = _PREEMPTED

    def _finish_attempt(self, job: _ServiceJob, cause: str, now: int, *, has_failed: bool) -> None:
        """Record the failure of an attempt; retry the job if its retry strategy allows it."""
        is_capacity = cause.startswith("CapacityError")
        # Retry strategies do not count missing capacity.
        job.failures += not is_capacity
        reason = f"{_STATUS_PREFIX}{cause}"
        job.end("FAILED", reason, now)
        strategy = job.request.get("retryStrategy", {})
        rules = strategy.get("evaluateOnExit", ())
        matching = (
            each["action"]
            for each in rules
            if fnmatch.fnmatch(reason, each.get("onStatusReason", "*"))
        )
        is_allowed = (
            job.failures < strategy.get("attempts", 1) and next(matching, "RETRY") == "RETRY"
        )
        if is_capacity or (has_failed and is_allowed):
            job.status = "RUNNABLE"
            job.stopped = 0
            job.reason = _NO_CAPACITY if is_capacity else ""
            job.retry_at = now + _RETRY_MILLISECONDS if is_capacity else 0

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


_ARN = f"arn:aws:batch:{REGION}:{ACCOUNT}"


def _queue_arn(name: str) -> str:
    return f"{_ARN}:job-queue/{name}"


def _queue_name(text: str) -> str:
    """Return the name of a queue from its name or ARN."""
    for name in QUEUES:
        if text in (name, _queue_arn(name)):
            return name
    raise _client_error(f"JobQueue {text} not found.")


def _describe_queue(name: str) -> dict[str, Any]:
    policy = {}
    if name != QUEUE:
        policy["schedulingPolicyArn"] = f"{_ARN}:scheduling-policy/cloudtrain-sandbox"
    return {
        "jobQueueName": name,
        "jobQueueArn": _queue_arn(name),
        "state": "ENABLED",
        "status": "VALID",
        "statusReason": "JobQueue Healthy",
        "priority": 1,
        "computeEnvironmentOrder": [],
        "serviceEnvironmentOrder": [
            {"order": 1, "serviceEnvironment": f"{_ARN}:service-environment/{name}"}
        ],
        "jobQueueType": SERVICE_JOB_TYPE,
        "tags": {},
        **policy,
    }
