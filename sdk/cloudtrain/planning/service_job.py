"""The SubmitServiceJob document: a training job that waits its turn in an AWS Batch job queue.

Sources: botocore 1.44.5's model of batch 2016-08-10, AWS Batch user guide (service jobs: payloads, retries, status,
getting started) and `sagemaker.aws_batch` 2.257, all read in 2026-11. AWS Batch itself was never called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.job.spec import JobSpec
from cloudtrain_runtime.contract.strict_json import dump_json

SERVICE_JOB_TYPE = "SAGEMAKER_TRAINING"
TRAINING_JOB_PREFIX = "AWSBatch"
"""What AWS Batch puts before the name in the payload; behind it goes the attempt's id, 32 hexadecimal digits."""
ATTEMPT_ID_CHARACTERS = 32
_NAME_CHARACTERS = 63  # botocore's model of TrainingJobName


def render_service_job(spec: JobSpec, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the SubmitServiceJob document of a job without its payload, or None where it waits in no queue.

    - The job's name and the client token are the run id, so that a call that is made twice makes one job.
    - One attempt: `limits.retries` works inside the training job, and capacity is waited for without counting.
    - No timeout: the payload's StoppingCondition bounds each attempt. (`sagemaker.aws_batch` would say one day, and
      end longer runs.)
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
        # The SDK moves them here from the payload, too.
        "tags": {tag["Key"]: tag["Value"] for tag in request["Tags"]},
    }
    if queue.priority is not None:
        document["schedulingPriority"] = queue.priority
    if queue.share is not None:
        document["shareIdentifier"] = queue.share
    return document


def render_payload(request: Mapping[str, Any]) -> str:
    """Return serviceRequestPayload: the CreateTrainingJob document as JSON, without the tags, which stand outside."""
    return dump_json({name: value for name, value in request.items() if name != "Tags"})


def training_job_name(run: str, attempt: str) -> str:
    """Return a name of the form that AWS Batch gives to the training job of an attempt.

    How it cuts a name that is too long is not documented: never look for a job by this, ask for the attempt's ARN.
    """
    room = _NAME_CHARACTERS - len(TRAINING_JOB_PREFIX) - ATTEMPT_ID_CHARACTERS
    return f"{TRAINING_JOB_PREFIX}{run[:room]}{attempt}"
