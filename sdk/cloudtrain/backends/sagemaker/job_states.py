"""Translation of DescribeTrainingJob into states, reasons, phases and limits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
"""State by SecondaryStatus of a job in progress. A test compares the keys with botocore's model."""

_DELETED_STATES = {"Completed": State.SUCCEEDED, "Failed": State.FAILED}
"""State by SecondaryStatus of a job that is being deleted. For other values it is STOPPED."""

_MAX_RUNTIME = "MaxRuntimeExceeded"
_MAX_WAIT = "MaxWaitTimeExceeded"
_MAX_PENDING = "MaxPendingTimeExceeded"
_ON_INSTANCES = frozenset(
    {"Downloading", "DownloadingTrainingImage", "Training", "Updating", "Uploading", "Stopping"}
)
_WAITING = frozenset({"Starting", "LaunchingMLInstances", "Pending", "Interrupted", "Restarting"})
_TOLERANCE = timedelta(minutes=1)
"""How much before its limit a wait can end, according to the job's times."""


def map_state(status: str, secondary: str) -> State:
    """Return the state for a TrainingJobStatus and its SecondaryStatus."""
    if status == "Deleting":
        return _DELETED_STATES.get(secondary, State.STOPPED)
    if status in FINAL_STATES:
        return FINAL_STATES[status]
    if status == "Stopping":
        return State.STOPPING
    # A secondary status that is newer than this mapping. The job is in progress in any case.
    return ACTIVE_STATES.get(secondary, State.RUNNING)


def read_state(job: Mapping[str, Any]) -> State:
    """Return the state of a job. An interrupted job is INTERRUPTED until it downloads again."""
    state = map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", ""))
    if state not in (State.QUEUED, State.STARTING) or job.get("SecondaryStatus") not in _WAITING:
        return state
    passed = (phase.name for phase in reversed(read_phases(job)))
    if "Interrupted" in itertools.takewhile(_WAITING.__contains__, passed):
        return State.INTERRUPTED
    return state


def read_reason(job: Mapping[str, Any], now: datetime) -> str:
    """Return why a job (a response of DescribeTrainingJob) is in its state; empty if there is no reason."""
    if job.get("FailureReason"):
        return str(job["FailureReason"])
    if read_state(job) in (State.STOPPED, State.STOPPING):
        return _stop_reason(job, now)
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    return str(transitions[-1].get("StatusMessage", ""))


def _stop_reason(job: Mapping[str, Any], now: datetime) -> str:
    """Return why a job was stopped, and what to do.

    The last secondary status names the limit that ended the job. While the job still stops or uploads, its times decide
    which limit it reached. For MaxPendingTimeInSeconds botocore's model has no secondary status, though AWS Batch reads
    one (https://docs.aws.amazon.com/batch/latest/userguide/sm_job_stuck_in_runnable_capacity.html, read 2026-11). So
    any status that contains `Pending` counts as it; without one, the times decide.
    """
    stopping = job.get("StoppingCondition", {})
    ending = _reported_ending(job) or _ending_by_times(job, now)
    names = ("MaxRuntime", "MaxWaitTime", "MaxPendingTime")
    seconds = {name: stopping.get(f"{name}InSeconds") for name in names}
    limit = {
        name: "" if each is None else f" ({format_duration(int(each))})"
        for name, each in seconds.items()
    }
    resume = "resume from the last checkpoint"
    if ending == _MAX_RUNTIME:
        return (
            f"{ending}: the run reached its limit{limit['MaxRuntime']}, set by limits.runtime or limits.cost; "
            f"raise it and {resume}"
        )
    if ending == _MAX_WAIT and job.get("TrainingStartTime") is None:
        return (
            f"{ending}: no spot capacity within cluster.spot.max_wait{limit['MaxWaitTime']}, nothing was billed; "
            "raise it, use another instance type, or remove cluster.spot"
        )
    if ending == _MAX_WAIT:
        times = sum(phase.name == "Interrupted" for phase in read_phases(job))
        plural = "s" if times > 1 else ""
        interrupted = f", after {times} interruption{plural}" if times else ""
        return (
            f"{ending}: waiting and training together reached cluster.spot.max_wait{limit['MaxWaitTime']}"
            f"{interrupted}; raise it or remove cluster.spot, and {resume}"
        )
    if ending == _MAX_PENDING:
        return (
            f"{ending}: no capacity within cluster.max_pending{limit['MaxPendingTime']}, nothing was billed; "
            "name more types in cluster.prefer, raise it, or submit again later"
        )
    if ending == "Interrupted":
        return f"interrupted: spot capacity was taken away and did not return; {resume}, or remove cluster.spot"
    return "stopped by request"


def _reported_ending(job: Mapping[str, Any]) -> str:
    """Return the ending that the secondary statuses name, or an empty string if they only name a stop."""
    history = [
        str(job.get("SecondaryStatus", "")),
        *(phase.name for phase in reversed(read_phases(job))),
    ]
    for name in history:
        if name in (_MAX_RUNTIME, _MAX_WAIT):
            return name
        if name not in ACTIVE_STATES and "Pending" in name:
            return _MAX_PENDING
    # A job that a user stops has the status Stopping; an interrupted one has not.
    lasting = [name for name in history if name != "Stopped"]
    return "Interrupted" if lasting[:1] == ["Interrupted"] else ""


def _ending_by_times(job: Mapping[str, Any], now: datetime) -> str:
    """Return the limit that a job has reached according to its times, or an empty string."""
    limits = job.get("StoppingCondition", {})
    phases = read_phases(job)
    stopped = next(
        (phase.started for phase in reversed(phases) if phase.name in ("Stopping", "Stopped")), now
    )
    since_created = stopped - job.get("CreationTime", stopped)
    if job.get("TrainingStartTime") is None and _reaches(
        since_created + _TOLERANCE, limits.get("MaxPendingTimeInSeconds")
    ):
        return _MAX_PENDING
    if job["TrainingJobStatus"] != "Stopping":
        # The secondary status of an ended job names its limit.
        return ""
    before = [phase for phase in phases if phase.started < stopped]
    if _reaches(
        timedelta(seconds=seconds_on_instances(before, stopped)), limits.get("MaxRuntimeInSeconds")
    ):
        return _MAX_RUNTIME
    return _MAX_WAIT if _reaches(since_created, limits.get("MaxWaitTimeInSeconds")) else ""


def _reaches(passed: timedelta, limit: Any) -> bool:
    return limit is not None and passed >= timedelta(seconds=int(limit))


def read_phases(job: Mapping[str, Any]) -> tuple[Phase, ...]:
    """Return the phases of a job so far, in order."""
    return tuple(
        Phase(
            name=str(each["Status"]),
            started=each["StartTime"],
            ended=each.get("EndTime"),
            detail=str(each.get("StatusMessage", "")),
            is_billed=each["Status"] in _ON_INSTANCES,
        )
        for each in job.get("SecondaryStatusTransitions", ())
    )


def seconds_on_instances(phases: Sequence[Phase], now: datetime) -> int:
    """Return an estimate of the billed seconds so far; AWS reports them only for ended jobs.

    Waiting for capacity is not billed. AWS bills fewer seconds for managed spot, and reports them at the end.
    """
    spans = ((phase.ended or now) - phase.started for phase in phases if phase.is_billed)
    return round(sum(span.total_seconds() for span in spans))


def read_waiting(job: Mapping[str, Any]) -> Waiting | None:
    """Return what a job waits for, or None if it has instances or has ended."""
    secondary = job.get("SecondaryStatus", "")
    if job["TrainingJobStatus"] != "InProgress" or secondary not in _WAITING:
        return None
    limits = job.get("StoppingCondition", {})
    created = job.get("CreationTime")
    resources = job["ResourceConfig"]
    selected = resources.get("SelectedInstanceType") or resources.get("InstanceType")
    preferred = tuple(each["InstanceType"] for each in resources.get("InstancePreferences", ()))
    types = (selected,) if selected else preferred
    has_pending_limit = job.get("TrainingStartTime") is None and any(map(_is_accelerated, types))
    instances = read_instances(job)
    for is_limited, field, name in (
        (job.get("EnableManagedSpotTraining"), "MaxWaitTimeInSeconds", "cluster.spot.max_wait"),
        (has_pending_limit, "MaxPendingTimeInSeconds", "cluster.max_pending"),
    ):
        if created is not None and is_limited and limits.get(field) is not None:
            return Waiting(
                types=types,
                instances=instances,
                until=created + timedelta(seconds=limits[field]),
                limit=name,
            )
    return Waiting(types, instances)


def _is_accelerated(name: str) -> bool:
    """Whether MaxPendingTimeInSeconds applies to a type, as to accelerated and unknown ones."""
    instance = catalog.find_instance(name)
    return instance is None or instance.is_accelerated


def read_instances(job: Mapping[str, Any]) -> int:
    """Return the number of instances that a job has or requests."""
    resources = job["ResourceConfig"]
    preferred = (resources.get("InstancePreferences") or [{}])[0].get("InstanceCount")
    return int(
        resources.get("SelectedInstanceCount") or resources.get("InstanceCount") or preferred or 1
    )


def read_deadline(job: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return when a limit will end a job that has instances, or None."""
    limits = job.get("StoppingCondition", {})
    created = job.get("CreationTime")
    phases = read_phases(job)
    if job["TrainingJobStatus"] != "InProgress" or not phases or not phases[-1].is_billed:
        return None
    ends = []
    if limits.get("MaxRuntimeInSeconds") is not None:
        left = limits["MaxRuntimeInSeconds"] - seconds_on_instances(phases, now)
        ends.append(now + timedelta(seconds=left))
    if (
        job.get("EnableManagedSpotTraining")
        and limits.get("MaxWaitTimeInSeconds") is not None
        and created is not None
    ):
        ends.append(created + timedelta(seconds=limits["MaxWaitTimeInSeconds"]))
    return min(ends, default=None)
