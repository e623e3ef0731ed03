"""What SageMaker says of a training job, in our words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cloudtrain import catalog
from cloudtrain.runs.status import Phase, State, Waiting
from cloudtrain.support.units import format_duration

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

_DELETED_STATES = {"Completed": State.SUCCEEDED, "Failed": State.FAILED}
"""State of a job whose record is being deleted, by how it had ended; any other is STOPPED."""

_MAX_RUNTIME, _MAX_WAIT, _MAX_PENDING = "MaxRuntimeExceeded", "MaxWaitTimeExceeded", "MaxPendingTimeExceeded"
_ON_INSTANCES = frozenset({"Downloading", "DownloadingTrainingImage", "Training", "Updating", "Uploading", "Stopping"})
_WAITING = frozenset({"Starting", "LaunchingMLInstances", "Pending", "Interrupted", "Restarting"})
_LATE = timedelta(minutes=1)
"""How much earlier than its limit, by its own times, a wait may seem to have ended."""


def map_state(status: str, secondary: str) -> State:
    """Return our state for a TrainingJobStatus and its SecondaryStatus."""
    if status == "Deleting":
        return _DELETED_STATES.get(secondary, State.STOPPED)
    if status in FINAL_STATES:
        return FINAL_STATES[status]
    if status == "Stopping":
        return State.STOPPING
    # A secondary status newer than this mapping: the job is in progress, that much is sure.
    return ACTIVE_STATES.get(secondary, State.RUNNING)


def read_state(job: Mapping[str, Any]) -> State:
    """Return the state of a job, as its transitions tell it: one that was interrupted is so until it is downloading."""
    state = map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", ""))
    if state not in (State.QUEUED, State.STARTING) or job.get("SecondaryStatus") not in _WAITING:
        return state
    passed = (phase.name for phase in reversed(read_phases(job)))
    return State.INTERRUPTED if "Interrupted" in itertools.takewhile(_WAITING.__contains__, passed) else state


# ---------------------------------------------------------------- why


def read_reason(job: Mapping[str, Any], now: datetime) -> str:
    """Return why a job is in its state, for people; empty when there is nothing to say.

    Args:
        job: The answer of DescribeTrainingJob.
        now: The time, for a job that is being stopped.
    """
    if job.get("FailureReason"):
        return str(job["FailureReason"])
    if read_state(job) in (State.STOPPED, State.STOPPING):
        return _why_stopped(job, now)
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    return str(transitions[-1].get("StatusMessage", ""))


def _why_stopped(job: Mapping[str, Any], now: datetime) -> str:
    """Return which of the five ends of a stopped job it was, and what to do.

    A limit is told by the last secondary status, and while the job is still stopping, or uploads what it has, by its
    times. For MaxPendingTimeInSeconds botocore's model has no secondary status, though AWS Batch reads one
    (https://docs.aws.amazon.com/batch/latest/userguide/sm_job_stuck_in_runnable_capacity.html, read 2026-11), so any
    that names the pending time is taken for it, and else the times decide.
    """
    stopping = job.get("StoppingCondition", {})
    ending = _told_ending(job) or _timed_ending(job, now)
    names = ("MaxRuntime", "MaxWaitTime", "MaxPendingTime")
    limit = {name: _duration(stopping.get(f"{name}InSeconds")) for name in names}
    resume = "resume from the last checkpoint"
    if ending == _MAX_RUNTIME:
        spent = f"the run's time{limit['MaxRuntime']} is over, which is limits.runtime or what limits.cost pays for"
        return f"{ending}: {spent}; raise it and {resume}"
    if ending == _MAX_WAIT and job.get("TrainingStartTime") is None:
        return (
            f"{ending}: no spot capacity came in cluster.spot.max_wait{limit['MaxWaitTime']}, nothing was billed; "
            "raise it, take another instance type, or do without cluster.spot"
        )
    if ending == _MAX_WAIT:
        times = sum(phase.name == "Interrupted" for phase in read_phases(job))
        interrupted = f", after {times} interruption{'s' if times > 1 else ''}" if times else ""
        return (
            f"{ending}: the time of cluster.spot.max_wait{limit['MaxWaitTime']}, waiting and training together, is "
            f"over{interrupted}; raise it or do without cluster.spot, and {resume}"
        )
    if ending == _MAX_PENDING:
        return (
            f"{ending}: no capacity came in cluster.max_pending{limit['MaxPendingTime']}, nothing was billed; "
            "name more types in cluster.prefer, raise it, or submit again later"
        )
    if ending == "Interrupted":
        return f"interrupted: spot capacity was taken away for good; {resume}, or do without cluster.spot"
    return "stopped by request"


def _told_ending(job: Mapping[str, Any]) -> str:
    """Return the ending that the statuses name, or an empty string where they name none but a stop."""
    history = [str(job.get("SecondaryStatus", "")), *(phase.name for phase in reversed(read_phases(job)))]
    for name in history:
        if name in (_MAX_RUNTIME, _MAX_WAIT):
            return name
        if name not in ACTIVE_STATES and "Pending" in name:
            return _MAX_PENDING
    # Whom somebody stops goes through Stopping; who is interrupted for good does not.
    lasting = [name for name in history if name != "Stopped"]
    return "Interrupted" if lasting[:1] == ["Interrupted"] else ""


def _timed_ending(job: Mapping[str, Any], now: datetime) -> str:
    """Return the limit that a job has reached by its own times, or an empty string."""
    limits = job.get("StoppingCondition", {})
    phases = read_phases(job)
    stopped = next((phase.started for phase in reversed(phases) if phase.name in ("Stopping", "Stopped")), now)
    since_created = stopped - job.get("CreationTime", stopped)
    if job.get("TrainingStartTime") is None and _reaches(since_created + _LATE, limits.get("MaxPendingTimeInSeconds")):
        return _MAX_PENDING
    if job["TrainingJobStatus"] != "Stopping":
        return ""  # one that has ended is told by its secondary status
    before = [phase for phase in phases if phase.started < stopped]
    if _reaches(timedelta(seconds=seconds_on_instances(before, stopped)), limits.get("MaxRuntimeInSeconds")):
        return _MAX_RUNTIME
    return _MAX_WAIT if _reaches(since_created, limits.get("MaxWaitTimeInSeconds")) else ""


def _reaches(passed: timedelta, limit: Any) -> bool:
    return limit is not None and passed >= timedelta(seconds=int(limit))


def _duration(seconds: Any) -> str:
    return "" if seconds is None else f" ({format_duration(int(seconds))})"


# ---------------------------------------------------------------- phases and time


def read_phases(job: Mapping[str, Any]) -> tuple[Phase, ...]:
    """Return the stages that a job has gone through, as its transitions tell them, in their order."""
    return tuple(
        Phase(
            str(each["Status"]),
            each["StartTime"],
            each.get("EndTime"),
            str(each.get("StatusMessage", "")),
            is_billed=each["Status"] in _ON_INSTANCES,
        )
        for each in job.get("SecondaryStatusTransitions", ())
    )


def seconds_on_instances(phases: Sequence[Phase], now: datetime) -> int:
    """Return how long instances have been paid for so far; AWS tells the billed seconds only of a job that has ended.

    Waiting for capacity is not paid for. Managed spot is billed for less: AWS says how much at the end.
    """
    spans = ((phase.ended or now) - phase.started for phase in phases if phase.is_billed)
    return round(sum(span.total_seconds() for span in spans))


def read_waiting(job: Mapping[str, Any]) -> Waiting | None:
    """Return what a job waits for, or None when it has instances or has ended."""
    secondary = job.get("SecondaryStatus", "")
    if job["TrainingJobStatus"] != "InProgress" or secondary not in _WAITING:
        return None
    limits, created = job.get("StoppingCondition", {}), job.get("CreationTime")
    types = tuple(_wanted_types(job))
    has_pending_limit = job.get("TrainingStartTime") is None and any(map(_is_accelerated, types))
    waiting = Waiting(types, read_instances(job))
    if created is None:
        return waiting
    if job.get("EnableManagedSpotTraining") and limits.get("MaxWaitTimeInSeconds") is not None:
        end = created + timedelta(seconds=limits["MaxWaitTimeInSeconds"])
        return Waiting(types, waiting.instances, end, "cluster.spot.max_wait")
    if has_pending_limit and limits.get("MaxPendingTimeInSeconds") is not None:
        end = created + timedelta(seconds=limits["MaxPendingTimeInSeconds"])
        return Waiting(types, waiting.instances, end, "cluster.max_pending")
    return waiting


def _wanted_types(job: Mapping[str, Any]) -> Iterator[str]:
    resources = job["ResourceConfig"]
    if resources.get("SelectedInstanceType") or resources.get("InstanceType"):
        yield resources.get("SelectedInstanceType") or resources["InstanceType"]
        return
    for preference in resources.get("InstancePreferences", ()):
        yield preference["InstanceType"]


def _is_accelerated(name: str) -> bool:
    """Whether MaxPendingTimeInSeconds counts for a type (botocore's StoppingCondition); so it does for unknown ones."""
    instance = catalog.find_instance(name)
    return instance is None or instance.is_accelerated


def read_instances(job: Mapping[str, Any]) -> int:
    """Return the number of instances that a job has, or wants."""
    resources = job["ResourceConfig"]
    preferred = (resources.get("InstancePreferences") or [{}])[0].get("InstanceCount")
    return int(resources.get("SelectedInstanceCount") or resources.get("InstanceCount") or preferred or 1)


def read_deadline(job: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return when its limits end a job that has instances, or None where none does."""
    limits, created = job.get("StoppingCondition", {}), job.get("CreationTime")
    phases = read_phases(job)
    if job["TrainingJobStatus"] != "InProgress" or not phases or not phases[-1].is_billed:
        return None
    ends = []
    if limits.get("MaxRuntimeInSeconds") is not None:
        left = limits["MaxRuntimeInSeconds"] - seconds_on_instances(phases, now)
        ends.append(now + timedelta(seconds=left))
    if job.get("EnableManagedSpotTraining") and limits.get("MaxWaitTimeInSeconds") is not None and created is not None:
        ends.append(created + timedelta(seconds=limits["MaxWaitTimeInSeconds"]))
    return min(ends, default=None)
