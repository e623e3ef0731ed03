"""AWS Batch's operations on service jobs: two queues whose jobs become training jobs when their turn comes.

`cloudtrain-sandbox` is first in, first out; `cloudtrain-sandbox-fair` has a fair-share policy, so it takes jobs with a
share identifier and orders them by what the shares use, then by priority. Source: AWS Batch user guide, 2026-11.
"""

from __future__ import annotations

import fnmatch
import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.sandbox.fault_injection import FaultInjector
from cloudtrain.backends.sandbox.process import REGION
from cloudtrain.backends.sandbox.request_validation import ServiceError
from cloudtrain.backends.sandbox.training_job import ACCOUNT, Clock
from cloudtrain.backends.sandbox.training_job_operations import TrainingJobs
from cloudtrain.planning.service_job import SERVICE_JOB_TYPE, training_job_name

QUEUE = "cloudtrain-sandbox"
FAIR_QUEUE = "cloudtrain-sandbox-fair"

Document = Mapping[str, Any]

_WAITING = ("SUBMITTED", "RUNNABLE")
_ENDED = ("SUCCEEDED", "FAILED")
_STEP_SECONDS = 0.1
_RETRY_MILLISECONDS = 1000
"""How long a job without capacity holds up its queue before it is tried again; AWS does not tell its own time."""
_MOST_RESULTS = 100
_SNAPSHOT_JOBS = 100
_MOST_PRIORITY = 9999
_MOST_ATTEMPTS = 10
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_RECEIVED = "Received status from SageMaker: "
_TOO_LARGE = (
    "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE - Service environment(s) associated with the job queue cannot "
    "meet the capacity requirement of the job."
)
_NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - SageMaker has no capacity for the job at present."
_SECONDARY = {"Pending": "SCHEDULED", "Starting": "SCHEDULED", "Downloading": "STARTING"}
"""ServiceJobStatus by SecondaryStatus of a training job in progress; any other is RUNNING (same source)."""


@dataclass
class _ServiceJob:
    """A service job. Times are in milliseconds since the epoch."""

    id: str
    queue: str
    asked: Document
    payload: Document
    created: int
    status: str = "SUBMITTED"
    reason: str = ""
    scheduled: int = 0
    started: int = 0
    stopped: int = 0
    retry_at: int = 0
    is_terminated: bool = False
    failures: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def arn(self) -> str:
        return f"{_ARN}:service-job/{self.id}"

    @property
    def name(self) -> str:
        return str(self.asked["jobName"])

    @property
    def share(self) -> str:
        return str(self.asked.get("shareIdentifier", ""))

    @property
    def priority(self) -> int:
        return int(self.asked.get("schedulingPriority", 0))

    @property
    def instances(self) -> int:
        resources = self.payload.get("ResourceConfig", {})
        preferences = resources.get("InstancePreferences") or [{}]
        return int(resources.get("InstanceCount") or preferences[0].get("InstanceCount") or 1)

    @property
    def training_job(self) -> str:
        """Name of the latest training job."""
        return str(self.attempts[-1]["serviceResourceId"]["value"]).rpartition("/")[2]

    def end(self, status: str, reason: str, now: int) -> None:
        self.status, self.reason, self.stopped = status, reason, now
        if self.attempts:
            self.attempts[-1].setdefault("stoppedAt", now)
            self.attempts[-1].setdefault("statusReason", reason)

    def summary(self) -> dict[str, Any]:
        """Return its entry in ListServiceJobs."""
        told = {
            "jobId": self.id,
            "jobArn": self.arn,
            "jobName": self.name,
            "serviceJobType": SERVICE_JOB_TYPE,
            "status": self.status,
            "createdAt": self.created,
            "statusReason": self.reason,
            "shareIdentifier": self.share,
            "scheduledAt": self.scheduled,
            "startedAt": self.started,
            "stoppedAt": self.stopped,
            "isTerminated": self.is_terminated,
        }
        if self.attempts:
            told["latestAttempt"] = {"serviceResourceId": self.attempts[-1]["serviceResourceId"]}
        return {name: value for name, value in told.items() if value}

    def describe(self) -> dict[str, Any]:
        """Return the answer to DescribeServiceJob."""
        asked = ("retryStrategy", "schedulingPriority", "serviceRequestPayload", "tags", "timeoutConfig")
        return {
            **{name: self.asked[name] for name in asked if name in self.asked},
            **self.summary(),
            "attempts": self.attempts,
            "jobQueue": _queue_arn(self.queue),
            "startedAt": self.started,  # which the model requires
            "isTerminated": self.is_terminated,
        }


class ServiceJobs:
    """The queues of an account.

    Args:
        jobs: Where training jobs are created.
        sky: Its weather tells how many instances the jobs of a queue may have at once.
        clock: What the time is.
    """

    def __init__(self, jobs: TrainingJobs, sky: FaultInjector, clock: Clock) -> None:
        self._training = jobs
        self._sky = sky
        self._clock = clock
        self._lock = threading.RLock()
        self._jobs: dict[str, _ServiceJob] = {}
        self._tokens: set[str] = set()

    def keep_going(self, ending: threading.Event) -> None:
        """Let the queues move in a thread of their own until the sandbox ends."""

        def move() -> None:
            while not ending.wait(_STEP_SECONDS):
                self.step()

        threading.Thread(target=move, name="batch", daemon=True).start()

    def answer(self, operation: str, document: Document) -> Document:
        """Do an operation; return its answer.

        Raises:
            ServiceError: AWS Batch would refuse it, or the sandbox does not have it.
        """
        known = _OPERATIONS.get(operation)
        if known is None:
            raise _refused(f"cloudtrain sandbox: AWS Batch's {operation} is not supported")
        with self._lock:
            return known(self, document)

    # ------------------------------------------------------------ operations

    def _submit(self, asked: Document) -> Document:
        queue = self._check(asked)
        token = asked.get("clientToken")
        if token in self._tokens:
            raise _refused(f"A request with the client token {token} was submitted already")
        try:
            payload = json.loads(asked["serviceRequestPayload"])
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            raise _refused("serviceRequestPayload is not a JSON object")
        job = _ServiceJob(str(uuid.uuid4()), queue, asked, payload, self._now())
        self._jobs[job.id] = job
        if token:
            self._tokens.add(token)
        return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}

    def _check(self, asked: Document) -> str:
        """Return the queue's name, once what belongs to AWS Batch in a request is known to be right."""
        for name in ("jobName", "jobQueue", "serviceJobType", "serviceRequestPayload"):
            if not asked.get(name):
                raise _refused(f"{name} must not be empty")
        if not _JOB_NAME.fullmatch(asked["jobName"]):
            raise _refused("Job name should match valid pattern")
        if asked["serviceJobType"] != SERVICE_JOB_TYPE:
            raise _refused(f"Service job type {asked['serviceJobType']} is not valid")
        queue = _queue_of(asked["jobQueue"])
        is_fair = queue == FAIR_QUEUE
        if is_fair and not asked.get("shareIdentifier"):
            raise _refused("Share identifier must be specified when the job queue has a fair-share scheduling policy")
        if not is_fair and asked.get("shareIdentifier"):
            raise _refused("Share identifier must not be specified without a fair-share scheduling policy")
        if not 0 <= asked.get("schedulingPriority", 0) <= _MOST_PRIORITY:
            raise _refused("Scheduling priority must be between 0 and 9999")
        if not 1 <= asked.get("retryStrategy", {}).get("attempts", 1) <= _MOST_ATTEMPTS:
            raise _refused("Attempts must be between 1 and 10")
        return queue

    def _describe(self, asked: Document) -> Document:
        return self._find(asked).describe()

    def _terminate(self, asked: Document) -> Document:
        job = self._find(asked)
        reason = str(asked.get("reason") or "")
        if not reason:
            raise _refused("reason must not be empty")
        if job.status not in _ENDED:
            job.is_terminated, job.reason = True, reason
            if job.status in _WAITING:
                job.end("FAILED", reason, self._now())
            else:
                self._stop_training(job)
        return {}

    def _list(self, asked: Document) -> Document:
        queue = _queue_of(asked.get("jobQueue", ""))
        is_wanted = _filter(asked)
        found = [job for job in reversed(self._jobs.values()) if job.queue == queue and is_wanted(job)]
        size = int(asked.get("maxResults") or _MOST_RESULTS)
        begin = int(asked.get("nextToken") or 0)
        page = found[begin : begin + size]
        more = {"nextToken": str(begin + size)} if len(found) > begin + size else {}
        return {"jobSummaryList": [job.summary() for job in page], **more}

    def _snapshot(self, asked: Document) -> Document:
        waiting = self._in_order(_queue_of(asked.get("jobQueue", "")))[:_SNAPSHOT_JOBS]
        jobs = [{"jobArn": job.arn, "earliestTimeAtPosition": job.created} for job in waiting]
        return {"frontOfQueue": {"jobs": jobs, "lastUpdatedAt": self._now()}}

    def _describe_queues(self, asked: Document) -> Document:
        wanted = [name.rpartition("/")[2] for name in asked.get("jobQueues") or (QUEUE, FAIR_QUEUE)]
        return {"jobQueues": [_describe_queue(name) for name in (QUEUE, FAIR_QUEUE) if name in wanted]}

    def _describe_environments(self, asked: Document) -> Document:
        wanted = [name.rpartition("/")[2] for name in asked.get("serviceEnvironments") or (QUEUE, FAIR_QUEUE)]
        limits = [{"capacityUnit": "NUM_INSTANCES", "maxCapacity": self._sky.weather.queue_instances}]
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
            for name in (QUEUE, FAIR_QUEUE)
            if name in wanted
        ]
        return {"serviceEnvironments": found}

    def _find(self, asked: Document) -> _ServiceJob:
        job = self._jobs.get(str(asked.get("jobId", "")).rpartition("/")[2])  # the SageMaker SDK gives the ARN
        if job is None:
            raise _refused(f"Service job {asked.get('jobId')} not found.")
        return job

    def _now(self) -> int:
        return round(self._clock() * 1000)

    # ------------------------------------------------------------ what moves by itself

    def step(self) -> None:
        """Follow the training jobs, and start those whose turn has come."""
        with self._lock:
            for job in list(self._jobs.values()):
                if job.status == "SUBMITTED":
                    job.status = "RUNNABLE"
                elif job.status not in (*_WAITING, *_ENDED):
                    self._follow(job)
            for queue in (QUEUE, FAIR_QUEUE):
                self._start_next(queue)

    def _start_next(self, queue: str) -> None:
        """Start the first jobs of a queue as long as they have room; a large one holds up those behind it."""
        most = self._sky.weather.queue_instances
        while waiting := self._in_order(queue):
            job = waiting[0]
            if job.instances > most:
                job.reason = _TOO_LARGE
                return
            if sum(self._used(queue).values()) + job.instances > most or job.retry_at > self._now():
                return
            self._start(job)

    def _in_order(self, queue: str) -> list[_ServiceJob]:
        waiting = [job for job in self._jobs.values() if job.queue == queue and job.status == "RUNNABLE"]
        if queue == QUEUE:
            return waiting
        used = self._used(queue)
        return sorted(waiting, key=lambda job: (used.get(job.share, 0), -job.priority, job.created))

    def _used(self, queue: str) -> dict[str, int]:
        """Return the instances in use by share."""
        used: dict[str, int] = {}
        for job in self._jobs.values():
            if job.queue == queue and job.status not in (*_WAITING, *_ENDED):
                used[job.share] = used.get(job.share, 0) + job.instances
        return used

    def _start(self, job: _ServiceJob) -> None:
        name = training_job_name(str(job.payload.get("TrainingJobName", job.name)), uuid.uuid4().hex)
        tags = [{"Key": key, "Value": value} for key, value in job.asked.get("tags", {}).items()]
        request = {**job.payload, "TrainingJobName": name, **({"Tags": tags} if tags else {})}
        job.reason, job.scheduled = "", self._now()
        try:
            arn = self._training.answer("CreateTrainingJob", request)["TrainingJobArn"]
        except (ServiceError, KeyError, TypeError) as error:
            said = f"{error.code}: {error.message}" if isinstance(error, ServiceError) else f"ValidationError: {error}"
            job.end("FAILED", f"{_RECEIVED}{said}", self._now())
            return
        job.status = "SCHEDULED"
        job.attempts.append({"serviceResourceId": {"name": "TrainingJobArn", "value": arn}})

    def _follow(self, job: _ServiceJob) -> None:
        told = self._training.answer("DescribeTrainingJob", {"TrainingJobName": job.training_job})
        status, now = told["TrainingJobStatus"], self._now()
        if status in ("InProgress", "Stopping"):
            job.status = _SECONDARY.get(told["SecondaryStatus"], "RUNNING")
            if job.status == "RUNNING" and not job.attempts[-1].get("startedAt"):
                job.started = job.attempts[-1]["startedAt"] = now
            self._end_overdue(job, now)
        elif status == "Completed":
            job.end("SUCCEEDED", f"{_RECEIVED}Training job completed", now)
        elif job.is_terminated:
            job.end("FAILED", job.reason, now)
        else:
            self._settle(
                job, str(told.get("FailureReason") or "Training job stopped"), now, has_failed=status == "Failed"
            )

    def _settle(self, job: _ServiceJob, said: str, now: int, *, has_failed: bool) -> None:
        """Decide whether a job whose attempt has failed is tried again."""
        is_capacity = said.startswith("CapacityError")
        reason = f"{_RECEIVED}{said}"
        job.failures += not is_capacity  # which no retry strategy counts
        job.end("FAILED", reason, now)
        if is_capacity or (has_failed and _may_retry(job, reason)):
            job.status, job.stopped = "RUNNABLE", 0
            job.reason = _NO_CAPACITY if is_capacity else ""
            job.retry_at = now + _RETRY_MILLISECONDS if is_capacity else 0

    def _end_overdue(self, job: _ServiceJob, now: int) -> None:
        seconds = job.asked.get("timeoutConfig", {}).get("attemptDurationSeconds")
        if seconds and job.started and not job.is_terminated and now - job.started >= 1000 * seconds:
            job.is_terminated, job.reason = True, "Job attempt duration exceeded timeout"
            self._stop_training(job)

    def _stop_training(self, job: _ServiceJob) -> None:
        try:
            self._training.answer("StopTrainingJob", {"TrainingJobName": job.training_job})
        except ServiceError:  # it has just ended
            return


_OPERATIONS: Mapping[str, Callable[[ServiceJobs, Document], Document]] = {
    "SubmitServiceJob": ServiceJobs._submit,  # noqa: SLF001 (of this class)
    "DescribeServiceJob": ServiceJobs._describe,  # noqa: SLF001
    "TerminateServiceJob": ServiceJobs._terminate,  # noqa: SLF001
    "ListServiceJobs": ServiceJobs._list,  # noqa: SLF001
    "GetJobQueueSnapshot": ServiceJobs._snapshot,  # noqa: SLF001
    "DescribeJobQueues": ServiceJobs._describe_queues,  # noqa: SLF001
    "DescribeServiceEnvironments": ServiceJobs._describe_environments,  # noqa: SLF001
}
PATHS = {f"/v1/{name.lower()}": name for name in _OPERATIONS}
"""Operations by their address (botocore's model; a test compares)."""


def _refused(message: str) -> ServiceError:
    return ServiceError("ClientException", message)


def _may_retry(job: _ServiceJob, reason: str) -> bool:
    strategy = job.asked.get("retryStrategy", {})
    if job.failures >= strategy.get("attempts", 1):
        return False
    rules = strategy.get("evaluateOnExit", ())
    action = next(
        (rule["action"] for rule in rules if fnmatch.fnmatch(reason, rule.get("onStatusReason", "*"))), "RETRY"
    )
    return bool(action == "RETRY")


def _filter(asked: Document) -> Callable[[_ServiceJob], bool]:
    """Return what ListServiceJobs is asked for: a filter, or else a status, by default RUNNING."""
    filters = list(asked.get("filters") or ())
    if len(filters) > 1:
        raise _refused("Only one filter can be used at a time")
    status = asked.get("jobStatus") or ("" if filters else "RUNNING")
    if not filters:
        return lambda job: job.status == status
    name, values = filters[0].get("name"), [str(value) for value in filters[0].get("values", ())]
    if name == "JOB_NAME":
        return lambda job: any(_fits(job.name.lower(), value.lower()) for value in values)
    if name == "BEFORE_CREATED_AT":
        return lambda job: job.created < int(values[0])
    if name == "AFTER_CREATED_AT":
        return lambda job: job.created > int(values[0])
    if name == "SHARE_IDENTIFIER":
        return lambda job: job.share in values and status in ("", job.status)
    raise _refused(f"Filter {name} is not valid")


def _fits(name: str, value: str) -> bool:
    return name.startswith(value[:-1]) if value.endswith("*") else name == value


# ---------------------------------------------------------------- queues

_ARN = f"arn:aws:batch:{REGION}:{ACCOUNT}"


def _queue_arn(name: str) -> str:
    return f"{_ARN}:job-queue/{name}"


def _queue_of(text: str) -> str:
    """Return the name of a queue from its name or ARN."""
    for name in (QUEUE, FAIR_QUEUE):
        if text in (name, _queue_arn(name)):
            return name
    raise _refused(f"JobQueue {text} not found.")


def _describe_queue(name: str) -> dict[str, Any]:
    policy = {"schedulingPolicyArn": f"{_ARN}:scheduling-policy/cloudtrain-sandbox"} if name == FAIR_QUEUE else {}
    return {
        "jobQueueName": name,
        "jobQueueArn": _queue_arn(name),
        "state": "ENABLED",
        "status": "VALID",
        "statusReason": "JobQueue Healthy",
        "priority": 1,
        "computeEnvironmentOrder": [],
        "serviceEnvironmentOrder": [{"order": 1, "serviceEnvironment": f"{_ARN}:service-environment/{name}"}],
        "jobQueueType": SERVICE_JOB_TYPE,
        "tags": {},
        **policy,
    }
