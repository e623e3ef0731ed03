"""The SubmitServiceJob document of a training job that waits in an AWS Batch job queue.

Sources: botocore 1.44.5's model of batch 2016-08-10, AWS Batch user guide (service jobs: payloads, retries, status,
getting started) and `sagemaker.aws_batch` 2.257, all read in 2026-11. It is not tested against AWS Batch itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.job.spec import JobSpec
from cloudtrain_runtime.contract.strict_json import dump_json

SERVICE_JOB_TYPE = "SAGEMAKER_TRAINING"
TRAINING_JOB_PREFIX = "AWSBatch"
"""Prefix that AWS Batch adds to the name in the payload. It also appends the attempt's id, 32 hexadecimal digits."""
ATTEMPT_ID_CHARACTERS = 32
# Source: botocore's model of TrainingJobName.
_NAME_CHARACTERS = 63


def render_service_job(spec: JobSpec, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the SubmitServiceJob document of a job without its payload, or None for a job without a queue.

    - The job's name and the client token are the run id, so that a repeated call creates one job.
    - One attempt: `limits.retries` works inside the training job. Waiting for capacity and preemption are no attempts.
    - No timeout: the payload's StoppingCondition limits each attempt. (`sagemaker.aws_batch` would set one day, which
      would end longer runs.)
    """
    queue = spec.cluster.queue
    if queue is None:
        return None
    run = request["TrainingJobName"]
    document: dict[str, Any] = {
        "jobName": run,
        "jobQueue": queue.name,
        "serviceJobType": SERVICE_JOB_TYPE,
        "retryStrategy": {"attempts": 1},
        "clientToken": run,
        # The SageMaker SDK moves the tags from the payload to here, too.
        "tags": {tag["Key"]: tag["Value"] for tag in request["Tags"]},
    }
    if queue.priority is not None:
        document["schedulingPriority"] = queue.priority
    if queue.share is not None:
        document["shareIdentifier"] = queue.share
    if queue.quota_share is not None:
        document["quotaShareName"] = queue.quota_share
    if queue.preempt is not None:
        document["preemptionConfiguration"] = {"preemptionRetriesBeforeTermination": queue.preempt}
    return document


def render_payload(request: Mapping[str, Any]) -> str:
    """Return serviceRequestPayload: the CreateTrainingJob document as JSON, without its tags."""
    return dump_json({name: value for name, value in request.items() if name != "Tags"})


def training_job_name(run: str, attempt: str) -> str:
    """Return a name of the form that AWS Batch gives to the training job of an attempt.

    AWS does not document how a long name is shortened. Do not find a job by this name: use the attempt's ARN.
    """
    room = _NAME_CHARACTERS - len(TRAINING_JOB_PREFIX) - ATTEMPT_ID_CHARACTERS
    return f"{TRAINING_JOB_PREFIX}{run[:room]}{attempt}"
