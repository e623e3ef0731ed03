"""Runs that wait in an AWS Batch job queue: sent there, found again from their id alone, told as training jobs.

AWS Batch names the training job itself, `AWSBatch...`, and makes a new one for each attempt, so no run of a queue is
found by its name in SageMaker. The way there is: run id, plan.json in S3, the queue's name, the service job of that
name, its latest attempt. SageMaker's own search finds training jobs that AWS Batch has forgotten.

AWS Batch itself was never called; sources stand in `cloudtrain.planning.service_job`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.backends.sagemaker.job_states import map_state
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.s3_uri import split_uri

PLAN_FILE = "plan.json"
QUEUES_FOLDER = "queues"
"""Below the prefix: an empty object for each queue that was ever sent to, so that `list` knows where to ask."""
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
"""TrainingJobStatus and SecondaryStatus by ServiceJobStatus: every one that botocore's model knows (a test compares).

Source: AWS Batch user guide, mapping service job status to SageMaker AI status, 2026-11. PENDING is in the model only.
"""

_RECEIVED = "Received status from SageMaker: "
_RULE_ENDED = "Terminated by JobStateTimeLimit"
_FORGOTTEN = ("ClientException", "ResourceNotFoundException")
_NOT_THERE = ("NoSuchKey", "NoSuchBucket", "404", "AccessDenied")
"""S3 says AccessDenied of what is not there to whom may not list the bucket."""


@dataclass
class _Known:
    """What was found out about a run of a queue."""

    queue: str
    request: Mapping[str, Any]
    job_id: str | None = None
    is_final: bool = False
    names: tuple[str, ...] = field(default=())


class BatchQueues:
    """The service jobs of an account.

    Args:
        settings: Bucket and prefix tell where plans lie.
        client: Returns a boto3 client by its service's name.
    """

    def __init__(self, settings: Settings, client: Callable[[str], Any]) -> None:
        self._settings = settings
        self._client = client
        self._known: dict[str, _Known] = {}

    # ------------------------------------------------------------ submit

    def submit(self, plan: Plan, payload: str) -> None:
        """Put a run into its queue; the same run again changes nothing.

        Args:
            plan: A plan with a queue, whose plan.json lies in S3 already.
            payload: The CreateTrainingJob document as JSON.

        Raises:
            CloudError: AWS refused; there is no job.
        """
        from botocore.exceptions import ClientError

        document = plan.queue or {}
        queue = str(document["jobQueue"])
        known = self._known[plan.run] = _Known(queue, plan.request)
        hints = {"ClientException": f"see: aws batch describe-job-queues --job-queues {queue}"}
        with aws_errors(f"submit to the queue {queue}", hints):
            place = split_uri(f"{self._base()}/{QUEUES_FOLDER}/{queue.rpartition('/')[2]}")
            self._client("s3").put_object(Bucket=place.bucket, Key=place.key, Body=b"")
            try:
                answer = self._client("batch").submit_service_job(**document, serviceRequestPayload=payload)
                known.job_id = str(answer["jobId"])
            except ClientError as error:
                # "Identical payloads and clientTokens are considered the same request and the second is rejected": the
                # first was ours, and its answer was lost on the way.
                if error.response["Error"]["Code"] != "ClientException" or self._find_id(plan.run, known) is None:
                    raise

    def _base(self) -> str:
        return f"s3://{self._settings.bucket}/{self._settings.prefix}".rstrip("/")

    # ------------------------------------------------------------ look

    def describe(self, run: str) -> Mapping[str, Any] | None:
        """Return what DescribeTrainingJob would say of a run in a queue, or None when it is none.

        Raises:
            CloudError: AWS does not tell.
        """
        known = self._known.get(run) or self._read_plan(run)
        if known is None:
            return None
        self._known[run] = known
        with aws_errors(f"look into the queue {known.queue}"):
            service = self._service_job(run, known)
            if service is None:
                known.names = tuple(self._search(run))
                known.is_final = True
                return self._training_job(known.names[-1]) if known.names else None
            known.names = attempt_names(service)
            known.is_final = service["status"] in ENDED
            is_waiting = service["status"] in WAITING
            job = None if is_waiting or not known.names else self._training_job(known.names[-1])
            place = self._place_in_queue(service) if service["status"] == "RUNNABLE" else None
        return as_training_job(run, known.request, service, job, place)

    def names(self, run: str) -> tuple[str, ...] | None:
        """Return the names of a run's training jobs, the newest last, or None for a run that no queue is known of."""
        known = self._known.get(run)
        return None if known is None else known.names

    def _read_plan(self, run: str) -> _Known | None:
        """Return what plan.json says of the queue, or None where there is none."""
        from botocore.exceptions import ClientError

        if self._settings.bucket is None:
            return None
        place = split_uri(f"{self._base()}/{run}/{PLAN_FILE}")
        with aws_errors(f"read the plan of {run}"):
            try:
                body = self._client("s3").get_object(Bucket=place.bucket, Key=place.key)["Body"].read()
            except ClientError as error:
                if error.response["Error"]["Code"] in _NOT_THERE:
                    return None
                raise
        try:
            plan = json.loads(body)
            queue = plan["queue"]
            return None if queue is None else _Known(str(queue["jobQueue"]), dict(plan["request"]))
        except (ValueError, TypeError, KeyError):
            return None  # of a version without queues, or none of ours

    def _service_job(self, run: str, known: _Known) -> Mapping[str, Any] | None:
        """Return what AWS Batch says of a run, or None where it knows nothing of it any more."""
        from botocore.exceptions import ClientError

        if known.job_id is None and self._find_id(run, known) is None:
            return None
        try:
            answer: Mapping[str, Any] = self._client("batch").describe_service_job(jobId=known.job_id)
        except ClientError as error:
            if error.response["Error"]["Code"] in _FORGOTTEN:
                return None
            raise
        return answer

    def _find_id(self, run: str, known: _Known) -> str | None:
        """Return the id of the newest service job with the run's name; the filter alone ignores case."""
        from botocore.exceptions import ClientError

        filters = [{"name": "JOB_NAME", "values": [run]}]
        try:
            for summary in self._summaries(known.queue, filters):
                if summary["jobName"] == run:
                    known.job_id = str(summary["jobId"])
                    return known.job_id
        except ClientError as error:
            if error.response["Error"]["Code"] not in _FORGOTTEN:  # a queue that was deleted knows no jobs
                raise
        return None

    def _summaries(self, queue: str, filters: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
        pages = self._client("batch").get_paginator("list_service_jobs").paginate(jobQueue=queue, filters=filters)
        for page in pages:
            yield from page["jobSummaryList"]

    def _training_job(self, name: str) -> Mapping[str, Any] | None:
        """Return a training job, or None when it is gone: AWS Batch deletes those that got no capacity."""
        from botocore.exceptions import ClientError

        try:
            answer: Mapping[str, Any] = self._client("sagemaker").describe_training_job(TrainingJobName=name)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("ValidationException", "ResourceNotFound"):
                return None
            raise
        return answer

    def _search(self, run: str) -> Iterator[str]:
        """Yield the names of the training jobs that were made of a run, the oldest first, as SageMaker finds them."""
        wanted = {"Name": "HyperParameters.sagemaker_job_name", "Operator": "Contains", "Value": run}
        pages = (
            self._client("sagemaker")
            .get_paginator("search")
            .paginate(
                Resource="TrainingJob",
                SearchExpression={"Filters": [wanted]},
                SortBy="CreationTime",
                SortOrder="Ascending",
            )
        )
        for page in pages:
            for record in page["Results"]:
                yield str(record["TrainingJob"]["TrainingJobName"])

    def _place_in_queue(self, service: Mapping[str, Any]) -> int | None:
        """Return how many jobs go first, as far as that may be known: the snapshot holds the first 100."""
        from botocore.exceptions import ClientError

        try:
            snapshot = self._client("batch").get_job_queue_snapshot(jobQueue=service["jobQueue"])
        except ClientError:
            return None  # an extra that needs a permission of its own
        jobs = [job["jobArn"] for job in snapshot.get("frontOfQueue", {}).get("jobs", ())]
        return jobs.index(service["jobArn"]) if service.get("jobArn") in jobs else None

    def list(self, backend: str, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the runs of every queue that was sent to under this prefix, the newest first.

        A run whose training job was stopped past AWS Batch counts as FAILED there; its `status` knows better.
        """
        if self._settings.bucket is None:
            return
        with aws_errors("list the jobs of the queues"):
            runs = [self._runs_of(queue, backend, wanted) for queue in self._queues()]
            yield from heapq.merge(*runs, key=submission_time, reverse=True)

    def _runs_of(self, queue: str, backend: str, wanted: RunFilter) -> Iterator[Status]:
        from botocore.exceptions import ClientError

        filters = [{"name": "AFTER_CREATED_AT", "values": ["0"]}]  # without a filter, RUNNING ones only
        try:
            for summary in self._summaries(queue, filters):
                status = _status(summary, backend)
                is_wanted = is_run_id(status.run) and wanted.accepts(status)
                if is_wanted and (not wanted.tags or wanted.accepts_tags(self._tags(summary))):
                    yield status
        except ClientError as error:
            if error.response["Error"]["Code"] not in _FORGOTTEN:
                raise

    def _tags(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the tags of a service job, which a list of them does not tell."""
        tags: Mapping[str, str] = self._client("batch").describe_service_job(jobId=summary["jobId"]).get("tags", {})
        return tags

    def _queues(self) -> Iterator[str]:
        """Yield the names of the queues; none to whom may not look, so that `list` still tells the other runs."""
        from botocore.exceptions import ClientError

        place = split_uri(f"{self._base()}/{QUEUES_FOLDER}/")
        pages = self._client("s3").get_paginator("list_objects_v2")
        try:
            for page in pages.paginate(Bucket=place.bucket, Prefix=f"{place.key.rstrip('/')}/"):
                for found in page.get("Contents", ()):
                    yield str(found["Key"]).rpartition("/")[2]
        except ClientError as error:
            if error.response["Error"]["Code"] not in _NOT_THERE:
                raise

    # ------------------------------------------------------------ stop

    def stop(self, run: str) -> bool:
        """Ask AWS Batch to end a run that was described before; return False when it is not one of a queue.

        AWS Batch stops the training job, where there is one already. (TerminateServiceJob, user guide, 2026-11.)
        """
        known = self._known.get(run)
        if known is None or known.job_id is None:
            return False
        if not known.is_final:
            with aws_errors(f"stop it in the queue {known.queue}"):
                self._client("batch").terminate_service_job(jobId=known.job_id, reason=STOP_REASON)
        return True


# ---------------------------------------------------------------- what a service job says


def attempt_names(service: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the training jobs that AWS Batch has made of a service job, the newest last."""
    attempts = (*service.get("attempts", ()), service.get("latestAttempt", {}))
    arns = [attempt.get("serviceResourceId", {}).get("value", "") for attempt in attempts]
    return tuple(dict.fromkeys(arn.rpartition("/")[2] for arn in arns if arn))


def as_training_job(
    run: str,
    request: Mapping[str, Any],
    service: Mapping[str, Any],
    job: Mapping[str, Any] | None,
    place: int | None = None,
) -> Mapping[str, Any]:
    """Return the answer of DescribeTrainingJob for a run of a queue; its time in the queue is a phase of its own.

    Args:
        run: Run id.
        request: The CreateTrainingJob document of its plan.
        service: The answer of DescribeServiceJob.
        job: The answer of DescribeTrainingJob for the latest attempt, or None while there is none.
        place: How many jobs of the queue go first, if known.
    """
    waited = _queued(service, job, place)
    has_failed = job is not None and job["TrainingJobStatus"] in ("Failed", "Stopped")
    # A training job that found no capacity is no end: AWS Batch tries again until there is some.
    is_settled = service["status"] in ENDED or not has_failed
    was_cut_off = has_failed and _was_terminated(service) and "CapacityError" in str((job or {}).get("FailureReason"))
    if job is not None and is_settled and not was_cut_off:
        transitions = [waited, *job.get("SecondaryStatusTransitions", ())]
        return {**job, "CreationTime": waited["StartTime"], "SecondaryStatusTransitions": transitions}
    status, secondary = _statuses(service) if is_settled else TRAINING_JOB_STATUSES["RUNNABLE"]
    told: dict[str, Any] = {
        **request,
        "TrainingJobName": run,
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "CreationTime": waited["StartTime"],
        "SecondaryStatusTransitions": [waited],
    }
    reason = str(service.get("statusReason", ""))
    if status in ("Failed", "Stopped") and reason and reason != STOP_REASON:
        told["FailureReason"] = reason.removeprefix(_RECEIVED)
    if service["status"] in ENDED and (ended := _time(service.get("stoppedAt"))) is not None:
        told["TrainingEndTime"] = ended
    return told


def _statuses(service: Mapping[str, Any]) -> tuple[str, str]:
    """Return TrainingJobStatus and SecondaryStatus of a service job without a training job."""
    if service["status"] == "FAILED" and _was_terminated(service):
        return "Stopped", "Stopped"
    # A status newer than this table: the job is there and has not ended, that much is sure.
    return TRAINING_JOB_STATUSES.get(service["status"], TRAINING_JOB_STATUSES["RUNNABLE"])


def _was_terminated(service: Mapping[str, Any]) -> bool:
    """Whether somebody, or a rule of the queue, has ended the job rather than the job itself."""
    return bool(service.get("isTerminated")) or str(service.get("statusReason", "")).startswith(_RULE_ENDED)


def _queued(service: Mapping[str, Any], job: Mapping[str, Any] | None, place: int | None) -> dict[str, Any]:
    """Return the time in the queue as a transition of a training job."""
    queue = str(service["jobQueue"]).rpartition("/")[2]
    before = "" if not place else f", {place} job{'' if place == 1 else 's'} before it"
    reason = f": {service['statusReason']}" if service.get("statusReason") and service["status"] not in ENDED else ""
    ended = _time(service.get("scheduledAt")) or _time(service.get("stoppedAt"))
    if ended is None and job is not None:
        ended = job.get("CreationTime")
    waits = service["status"] in WAITING
    return {
        "Status": "Queued",
        "StartTime": _time(service.get("createdAt")) or datetime.now(UTC),
        **({"EndTime": ended} if ended is not None and not waits else {}),
        "StatusMessage": f"{'waits' if waits else 'waited'} in the queue {queue}{before}{reason}",
    }


def _time(milliseconds: Any) -> datetime | None:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC) if milliseconds else None


def _status(summary: Mapping[str, Any], backend: str) -> Status:
    return Status(
        run=summary["jobName"],
        backend=backend,
        state=map_state(*_statuses(summary)),
        created=_time(summary.get("createdAt")),
        ended=_time(summary.get("stoppedAt")),
    )
