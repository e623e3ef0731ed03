"""What SageMaker says of a training job, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cloudtrain.run import Phase, State

FINAL_STATES = {
    "Completed": State.SUCCEEDED,
    "Failed": State.FAILED,
    "Stopped": State.STOPPED,
    "Deleting": State.STOPPED,
}
"""TrainingJobStatus of an ended job. `Stopped` is never success."""

ACTIVE_STATES = {
    "Pending": State.QUEUED,
    "Starting": State.STARTING,
    "LaunchingMLInstances": State.STARTING,
    "PreparingTrainingStack": State.STARTING,
    "Downloading": State.STARTING,
    "DownloadingTrainingImage": State.STARTING,
    "Restarting": State.STARTING,
    "Training": State.RUNNING,
    "Updating": State.RUNNING,
    "Uploading": State.RUNNING,
    "Interrupted": State.INTERRUPTED,
    "Stopping": State.STOPPING,
    "Stopped": State.STOPPING,
    "MaxRuntimeExceeded": State.STOPPING,
    "MaxWaitTimeExceeded": State.STOPPING,
    "Completed": State.RUNNING,
    "Failed": State.STOPPING,
}
"""SecondaryStatus of a job in progress: every one that botocore's model knows (a test compares)."""

_STOP_REASONS = {
    "MaxRuntimeExceeded": "MaxRuntimeExceeded: limits.runtime is over",
    "MaxWaitTimeExceeded": "MaxWaitTimeExceeded: spot capacity did not come in cluster.spot.max_wait",
    "Interrupted": "interrupted: spot capacity was taken away",
}


def map_state(status: str, secondary: str) -> State:
    """Return our state for a TrainingJobStatus and its SecondaryStatus."""
    if status in FINAL_STATES:
        return FINAL_STATES[status]
    if status == "Stopping":
        return State.STOPPING
    # A secondary status newer than this mapping: the job is in progress, that much is sure.
    return ACTIVE_STATES.get(secondary, State.RUNNING)


def read_reason(job: Mapping[str, Any]) -> str:
    """Return why a job is in its state, for people; empty when there is nothing to say."""
    if job.get("FailureReason"):
        return str(job["FailureReason"])
    if job["TrainingJobStatus"] in ("Stopped", "Stopping"):
        statuses = [entry.get("Status") for entry in job.get("SecondaryStatusTransitions", [])]
        for status in (job.get("SecondaryStatus"), *reversed(statuses)):
            if status in _STOP_REASONS:
                return _STOP_REASONS[status]
        return "stopped by request"
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    return str(transitions[-1].get("StatusMessage", ""))


def read_phases(job: Mapping[str, Any]) -> tuple[Phase, ...]:
    """Return the stages that a job has gone through, as its transitions tell them, in their order."""
    return tuple(
        Phase(str(each["Status"]), each["StartTime"], each.get("EndTime"), str(each.get("StatusMessage", "")))
        for each in job.get("SecondaryStatusTransitions", ())
    )


_ON_INSTANCES = ("Downloading", "DownloadingTrainingImage", "Training", "Updating", "Uploading", "Stopping")


def seconds_on_instances(phases: tuple[Phase, ...], now: datetime) -> int:
    """Return how long instances have been paid for so far; AWS tells the billed seconds only of a job that has ended.

    Waiting for capacity is not paid for. Managed spot is billed for less: AWS says how much at the end.
    """
    spans = ((phase.ended or now) - phase.started for phase in phases if phase.name in _ON_INSTANCES)
    return round(sum(span.total_seconds() for span in spans))
