"""Runs in AWS Batch job queues: submit, describe as training jobs, list and stop.

AWS Batch names the training jobs itself (`AWSBatch...`) and creates a new one for each attempt, so SageMaker has no
training job with the run's id. A run is found through its plan.json in S3, which names the queue, the service job with
the run's name, and the latest attempt of that job. If AWS Batch has deleted the service job, SageMaker's search finds
the training jobs.

This code was never run against AWS Batch itself. `cloudtrain.planning.service_job` names the sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cloudtrain.aws.errors import SuppressCodes, aws_errors
from cloudtrain.aws.s3_objects import HIDDEN_OBJECT, find_json, list_objects, put_object
from cloudtrain.backends.sagemaker.job_states import map_state
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.run_id import is_run_id
from cloudtrain_runtime.contract.aws_codes import MISSING_BUCKET, MISSING_IN_SAGEMAKER, code_of

QUEUES_FOLDER = "queues"
"""Folder below the prefix with an empty object for each used queue, so that `list` finds the queues."""
STOP_REASON = "stopped by cloudtrain"

WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
ENDED = ("SUCCEEDED", "FAILED")
TRAINING_JOB_STATUSES = {
    "SUBMITTED": ("InProgress", "Pending"),
    "PENDING": ("InProgress", "Pending"),
    "RUNNABLE": ("InProgress", "Pending"),
    "SCHEDULED": ("InProgress", "Pending"),
    "STARTING": ("InProgress", "Downloading"),
    "RUNNING": ("InProgress", "Training"),
    "SUCCEEDED": ("Completed", "Completed"),
    "FAILED": ("Failed", "Failed"),
}
"""TrainingJobStatus and SecondaryStatus by ServiceJobStatus. A test compares the keys with botocore's model.

Source: AWS Batch user guide, mapping service job status to SageMaker AI status, 2026-11. PENDING is in the model only.
"""

_SAGEMAKER_PREFIX = "Received status from SageMaker: "
_TIME_LIMIT_PREFIX = "Terminated by JobStateTimeLimit"
_JOB_NOT_FOUND = ("ClientException", "ResourceNotFoundException")
_HIDDEN = HIDDEN_OBJECT | MISSING_BUCKET


@dataclass
class _QueuedRun:
    """Cached facts about a run in a queue.

    Attributes:
        queue: Name or ARN of the queue.
        request: The CreateTrainingJob document of the plan.
        job_id: Id of the service job, once known.
        is_final: Whether the service job has ended.
        names: Names of its training jobs, the newest last.
    """

    queue: str
    request: Mapping[str, Any]
    job_id: str | None = None
    is_final: bool = False
    names: tuple[str, ...] = field(default=())


class BatchQueues:
    """The runs in the job queues of an account. `client` returns a boto3 client by the name of its service."""

    def __init__(self, settings: Settings, client: Callable[[str], Any]) -> None:
        self._settings = settings
        self._client = client
        self._known: dict[str, _QueuedRun] = {}

    def submit(self, plan: Plan, payload: str) -> None:
        """Put a run, whose plan.json is in S3 already, into its queue. It is idempotent.

        Raises:
            CloudError: AWS refused; no job was created.
        """
        from botocore.exceptions import ClientError

        document = plan.queue or {}
        queue = str(document["jobQueue"])
        known = self._known[plan.run] = _QueuedRun(queue, plan.request)
        hints = {"ClientException": f"see: aws batch describe-job-queues --job-queues {queue}"}
        with aws_errors(f"submit to the queue {queue}", hints):
            name = queue.rpartition("/")[2]
            put_object(self._client("s3"), f"{self._base()}/{QUEUES_FOLDER}/{name}", b"")
            try:
                answer = self._client("batch").submit_service_job(
                    **document, serviceRequestPayload=payload
                )
                known.job_id = str(answer["jobId"])
            except ClientError as error:
                # "Identical payloads and clientTokens are considered the same request and the second is rejected": if
                # the job exists, our first request succeeded and its response was lost.
                if code_of(error) != "ClientException" or self._find_id(plan.run, known) is None:
                    raise

    def _base(self) -> str:
        return f"s3://{self._settings.bucket}/{self._settings.prefix}".rstrip("/")

    def describe(self, run: str) -> Mapping[str, Any] | None:
        """Return the description of a queued run in the form of DescribeTrainingJob, or None if it is not queued.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        known = self._known.get(run) or self._read_plan(run)
        if known is None:
            return None
        self._known[run] = known
        with aws_errors(f"read the queue {known.queue}"):
            service = self._service_job(run, known)
            if service is None:
                known.names = tuple(self._search(run))
                known.is_final = True
                return self._training_job(known.names[-1]) if known.names else None
            known.names = attempt_names(service)
            known.is_final = service["status"] in ENDED
            is_waiting = service["status"] in WAITING
            job = None
            if known.names and not is_waiting:
                job = self._training_job(known.names[-1])
            position = None
            if service["status"] == "RUNNABLE":
                position = self._position_in_queue(service)
        return as_training_job(run, known.request, service, job, position)

    def names(self, run: str) -> tuple[str, ...] | None:
        """Return the names of a run's training jobs, the newest last; None if the run is not known to be queued."""
        known = self._known.get(run)
        return None if known is None else known.names

    def _read_plan(self, run: str) -> _QueuedRun | None:
        """Return queue and request of a run's plan.json, or None if it names no queue."""
        if self._settings.bucket is None:
            return None
        uri = f"{self._base()}/{run}/{PLAN_FILE}"
        with aws_errors(f"read the plan of {run}"):
            plan = find_json(self._client("s3"), uri, _HIDDEN) or {}
        try:
            queue = plan["queue"]
            if queue is None:
                return None
            return _QueuedRun(str(queue["jobQueue"]), dict(plan["request"]))
        except (ValueError, TypeError, KeyError):
            # There is no plan, or a version without queues or another program wrote it.
            return None

    def _service_job(self, run: str, known: _QueuedRun) -> Mapping[str, Any] | None:
        """Return the service job of a run, or None if AWS Batch has deleted it."""
        if known.job_id is not None or self._find_id(run, known) is not None:
            with SuppressCodes(_JOB_NOT_FOUND):
                return dict(self._client("batch").describe_service_job(jobId=known.job_id))
        return None

    def _find_id(self, run: str, known: _QueuedRun) -> str | None:
        """Return the id of the newest service job with the run's name. The filter of AWS Batch ignores case."""
        for summary in self._summaries(known.queue, "JOB_NAME", run):
            if summary["jobName"] == run:
                known.job_id = str(summary["jobId"])
                return known.job_id
        return None

    def _summaries(self, queue: str, name: str, value: str) -> Iterator[Mapping[str, Any]]:
        """Yield the jobs of a queue that a filter selects; none if the queue was deleted."""
        filters = [{"name": name, "values": [value]}]
        pages = (
            self._client("batch")
            .get_paginator("list_service_jobs")
            .paginate(jobQueue=queue, filters=filters)
        )
        with SuppressCodes(_JOB_NOT_FOUND):
            for page in pages:
                yield from page["jobSummaryList"]

    def _training_job(self, name: str) -> Mapping[str, Any] | None:
        """Return a training job, or None if it was deleted, as AWS Batch deletes those without capacity."""
        with SuppressCodes(MISSING_IN_SAGEMAKER):
            return dict(self._client("sagemaker").describe_training_job(TrainingJobName=name))
        return None

    def _search(self, run: str) -> Iterator[str]:
        """Yield the names of a run's training jobs that SageMaker's search finds, the oldest first."""
        wanted = {
            "Name": "HyperParameters.sagemaker_job_name",
            "Operator": "Contains",
            "Value": run,
        }
        expression = {"Filters": [wanted]}
        order = {"SortBy": "CreationTime", "SortOrder": "Ascending"}
        search = self._client("sagemaker").get_paginator("search")
        for page in search.paginate(Resource="TrainingJob", SearchExpression=expression, **order):
            for record in page["Results"]:
                yield str(record["TrainingJob"]["TrainingJobName"])

    def _position_in_queue(self, service: Mapping[str, Any]) -> int | None:
        """Return the number of jobs before this one, or None if it is not among the first 100."""
        from botocore.exceptions import ClientError

        try:
            snapshot = self._client("batch").get_job_queue_snapshot(jobQueue=service["jobQueue"])
        except ClientError:
            # The position is optional: it needs a separate permission.
            return None
        jobs = [job["jobArn"] for job in snapshot.get("frontOfQueue", {}).get("jobs", ())]
        return jobs.index(service["jobArn"]) if service.get("jobArn") in jobs else None

    def list(self, backend: str, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the runs of all used queues below the prefix, newest first.

        AWS Batch reports FAILED for a run whose training job was stopped in SageMaker; `describe` is more precise.
        """
        if self._settings.bucket is None:
            return
        with aws_errors("list the jobs of the queues"):
            runs = [self._runs_of(queue, backend, wanted) for queue in self._queues()]
            yield from heapq.merge(*runs, key=submission_time, reverse=True)

    def _runs_of(self, queue: str, backend: str, wanted: RunFilter) -> Iterator[Status]:
        # Without a filter, AWS lists only RUNNING jobs.
        for summary in self._summaries(queue, "AFTER_CREATED_AT", "0"):
            status = Status(
                run=summary["jobName"],
                backend=backend,
                state=map_state(*_statuses(summary)),
                created=_time(summary.get("createdAt")),
                ended=_time(summary.get("stoppedAt")),
            )
            is_wanted = is_run_id(status.run) and wanted.accepts(status)
            # Lists contain no tags.
            if is_wanted and wanted.tags:
                described = (
                    self._service_job(status.run, _QueuedRun(queue, {}, summary["jobId"])) or {}
                )
                is_wanted = wanted.accepts_tags(described.get("tags", {}))
            if is_wanted:
                yield status

    def _queues(self) -> Iterator[str]:
        """Yield the names of the queues; none without permission, so that `list` still shows the other runs."""
        with SuppressCodes(_HIDDEN):
            for entry in list_objects(self._client("s3"), f"{self._base()}/{QUEUES_FOLDER}/"):
                yield str(entry["Key"]).rpartition("/")[2]

    def stop(self, run: str) -> bool:
        """Ask AWS Batch to terminate a run that was described before; return False if it is not queued.

        AWS Batch also stops its training job, if there is one (TerminateServiceJob, user guide, 2026-11).
        """
        known = self._known.get(run)
        if known is None or known.job_id is None:
            return False
        if not known.is_final:
            with aws_errors(f"terminate the job in the queue {known.queue}"):
                self._client("batch").terminate_service_job(jobId=known.job_id, reason=STOP_REASON)
        return True


def attempt_names(service: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the training jobs of a service job, the newest last."""
    preempted = service.get("preemptionSummary", {}).get("recentPreemptedAttempts", ())
    attempts = (*preempted, *service.get("attempts", ()), service.get("latestAttempt", {}))
    arns = [attempt.get("serviceResourceId", {}).get("value", "") for attempt in attempts]
    return tuple(dict.fromkeys(arn.rpartition("/")[2] for arn in arns if arn))


def as_training_job(
    run: str,
    request: Mapping[str, Any],
    service: Mapping[str, Any],
    job: Mapping[str, Any] | None,
    position: int | None = None,
) -> Mapping[str, Any]:
    """Return a queued run in the form of DescribeTrainingJob. Its time in the queue is a separate phase.

    Args:
        run: Run id.
        request: The CreateTrainingJob document of its plan.
        service: Response of DescribeServiceJob.
        job: Response of DescribeTrainingJob for the latest attempt, or None while there is none.
        position: Number of jobs before it in the queue, if known.
    """
    queued = _queue_transition(service, job, position)
    has_failed = job is not None and job["TrainingJobStatus"] in ("Failed", "Stopped")
    # A training job without capacity is not final: AWS Batch retries until there is capacity.
    is_settled = service["status"] in ENDED or not has_failed
    lacked_capacity = has_failed and "CapacityError" in str((job or {}).get("FailureReason"))
    is_terminated_wait = lacked_capacity and _is_terminated(service)
    if job is not None and is_settled and not is_terminated_wait:
        transitions = [queued, *job.get("SecondaryStatusTransitions", ())]
        return {
            **job,
            "CreationTime": queued["StartTime"],
            "SecondaryStatusTransitions": transitions,
        }
    status, secondary = TRAINING_JOB_STATUSES["RUNNABLE"]
    if is_settled:
        status, secondary = _statuses(service)
    described: dict[str, Any] = {
        **request,
        "TrainingJobName": run,
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "CreationTime": queued["StartTime"],
        "SecondaryStatusTransitions": [queued],
    }
    reason = str(service.get("statusReason", ""))
    if status in ("Failed", "Stopped") and reason and reason != STOP_REASON:
        described["FailureReason"] = reason.removeprefix(_SAGEMAKER_PREFIX)
    if service["status"] in ENDED and (ended := _time(service.get("stoppedAt"))) is not None:
        described["TrainingEndTime"] = ended
    return described


def _statuses(service: Mapping[str, Any]) -> tuple[str, str]:
    """Return TrainingJobStatus and SecondaryStatus of a service job without a training job."""
    if service["status"] == "FAILED" and _is_terminated(service):
        return "Stopped", "Stopped"
    # A status that is newer than this table. The job exists and has not ended in any case.
    return TRAINING_JOB_STATUSES.get(service["status"], TRAINING_JOB_STATUSES["RUNNABLE"])


def _is_terminated(service: Mapping[str, Any]) -> bool:
    """Whether a user or a rule of the queue terminated the job."""
    return bool(service.get("isTerminated")) or str(service.get("statusReason", "")).startswith(
        _TIME_LIMIT_PREFIX
    )


def _queue_transition(
    service: Mapping[str, Any], job: Mapping[str, Any] | None, position: int | None
) -> dict[str, Any]:
    """Return the time in the queue as a transition of a training job."""
    queue = str(service["jobQueue"]).rpartition("/")[2]
    before = ""
    if position:
        jobs = "job" if position == 1 else "jobs"
        before = f", {position} {jobs} before it"
    reason = ""
    # The reason of an ended job is about its end, not about its time in the queue.
    if service.get("statusReason") and service["status"] not in ENDED:
        reason = f": {service['statusReason']}"
    ended = _time(service.get("scheduledAt")) or _time(service.get("stoppedAt"))
    if ended is None and job is not None:
        ended = job.get("CreationTime")
    is_waiting = service["status"] in WAITING
    verb = "waits" if is_waiting else "waited"
    end = {}
    if ended is not None and not is_waiting:
        end["EndTime"] = ended
    return {
        "Status": "Queued",
        "StartTime": _time(service.get("createdAt")) or datetime.now(UTC),
        **end,
        "StatusMessage": f"{verb} in the queue {queue}{before}{reason}",
    }


def _time(milliseconds: Any) -> datetime | None:
    if not milliseconds:
        return None
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
