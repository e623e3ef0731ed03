"""Slurm's states and reasons of jobs, as states of runs and in words."""

from __future__ import annotations

import enum
import os
import pwd
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudtrain.backends.slurm.slurm_output import SlurmJob
from cloudtrain.runs.status import State


class End(enum.StrEnum):
    """How a job of Slurm has ended."""

    COMPLETED = "completed"
    """The batch script ended with 0. Whether the training succeeded only the run's own record says."""
    CANCELLED_BY_USER = "cancelled by the user"
    CANCELLED_BY_OTHER = "cancelled by another user"
    """By an administrator, or by somebody who may do so."""
    CANCELLED = "cancelled"
    """Slurm does not say by whom: only accounting does."""
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    NODE_FAILED = "node failed"
    OUT_OF_MEMORY = "out of memory"
    NOT_STARTED = "not started"
    """Slurm could not start the job on its nodes."""
    FAILED = "failed"

    @property
    def is_cause(self) -> bool:
        """Whether it says why Slurm has ended the processes, which know only that they got a signal."""
        return self not in (End.COMPLETED, End.FAILED)


ENDED_BY_SLURM = "Slurm ended the job"
"""End of the reason that a batch step records when Slurm does not let it queue the job again."""


@dataclass(frozen=True)
class QueueState:
    """State of a job in Slurm's queue.

    Attributes:
        state: The state of a run whose own record is not final.
        reason: Why it is in this state, in words; may be empty.
        hint: What to do, or an empty text.
        end: How it has ended, or None before the end.
        is_stuck: Whether it waits and will not start before somebody does something.
    """

    state: State
    reason: str = ""
    hint: str = ""
    end: End | None = None
    is_stuck: bool = False


@dataclass(frozen=True)
class _Reason:
    """A reason for which a job waits: `{id}` in the hint is the job's id."""

    words: str
    hint: str = ""
    is_stuck: bool = False


_ASK = "ask the cluster's administrators"
_RELEASE = "to start it: scontrol release {id}"

_WAITING = {
    "resources": _Reason("waiting for resources"),
    "priority": _Reason("waiting for resources; jobs of a higher priority come first"),
    "nodes": _Reason(
        "waiting for nodes that are down, drained or reserved now", "see: sinfo --list-reasons"
    ),
    "none": _Reason("waiting for Slurm's scheduler"),
    "": _Reason("waiting for Slurm's scheduler"),
    "begintime": _Reason("waiting for its begin time"),
    "cleaning": _Reason("waiting for the end of its last attempt"),
    "prolog": _Reason("waiting for the preparation of its nodes"),
    "licenses": _Reason("waiting for licenses"),
    "reservation": _Reason("waiting for its reservation", "see: scontrol show reservation"),
    "reservationdeleted": _Reason(
        "its reservation was deleted", "submit it again without slurm.reservation", is_stuck=True
    ),
    "dependency": _Reason("waiting for another job that it depends on"),
    "dependencyneversatisfied": _Reason(
        "it depends on a job that did not end as required, so it never starts",
        "stop it, and submit it without --dependency or after the other job has succeeded",
        is_stuck=True,
    ),
    "jobhelduser": _Reason("held by its user", _RELEASE, is_stuck=True),
    "jobheldadmin": _Reason("held by an administrator", f"{_ASK} to release it", is_stuck=True),
    "jobholdmaxrequeue": _Reason(
        "held: it was queued again more often than Slurm allows (max_batch_requeue)",
        _RELEASE,
        is_stuck=True,
    ),
    "launch": _Reason(
        "held: Slurm could not start it on its nodes",
        f"see slurm.log and {_ASK}; {_RELEASE}",
        is_stuck=True,
    ),
    "user": _Reason(
        "held: Slurm could not load its environment on the node",
        f"{_ASK}; {_RELEASE}",
        is_stuck=True,
    ),
    "job": _Reason("held when it was queued again", _RELEASE, is_stuck=True),
    "partitiondown": _Reason("its partition is down", f"another partition (see: sinfo), or {_ASK}"),
    "partitioninactive": _Reason(
        "its partition accepts no jobs", f"another partition (see: sinfo), or {_ASK}"
    ),
    "partitionconfig": _Reason(
        "its partition does not allow the job",
        "another partition, or fewer cluster.instances",
        is_stuck=True,
    ),
    "partitionnodelimit": _Reason(
        "it needs more nodes than its partition has or allows",
        "another partition, or fewer cluster.instances",
        is_stuck=True,
    ),
    "partitiontimelimit": _Reason(
        "its time limit is longer than its partition allows",
        "to shorten it: scontrol update JobId={id} TimeLimit=MINUTES",
        is_stuck=True,
    ),
    "badconstraints": _Reason(
        "no nodes have together what it asks for",
        "see what they have: sinfo --format='%P %D %G %m %f'",
        is_stuck=True,
    ),
    "accountnotallowed": _Reason(
        "its account may not use its partition", "another slurm.partition or account", is_stuck=True
    ),
    "invalidaccount": _Reason(
        "its account is not valid any more",
        "see yours: sacctmgr show associations user=$USER",
        is_stuck=True,
    ),
    "invalidqos": _Reason("its QOS is not valid any more", "see: sacctmgr show qos", is_stuck=True),
    "qosnotallowed": _Reason(
        "its partition does not allow its QOS", "another slurm.qos", is_stuck=True
    ),
    "reqnodenotavail": _Reason(
        "waiting for nodes that are down, drained or reserved now", "see: sinfo --list-reasons"
    ),
    "nodedown": _Reason("waiting for a node that is down", "see: sinfo --list-reasons"),
    "maxmempernodelimit": _Reason(
        "it asks for more memory per node than Slurm allows",
        "less --mem in slurm.sbatch",
        is_stuck=True,
    ),
    "frontenddown": _Reason("waiting for a node that is down", _ASK),
    "deadline": _Reason(
        "it cannot end before its deadline", "submit without --deadline", is_stuck=True
    ),
}
"""By the first word of Slurm's reason in small letters."""

_IN_WORDS = {
    "job's account": _WAITING["accountnotallowed"],
    "job's qos": _WAITING["qosnotallowed"],
}
"""By how a reason begins, in small letters."""

_STATES = {
    "CONFIGURING": QueueState(State.STARTING, "Slurm prepares the nodes"),
    "COMPLETING": QueueState(State.STOPPING, "Slurm ends its processes"),
    "RUNNING": QueueState(State.RUNNING),
    "RESIZING": QueueState(State.RUNNING),
    "SIGNALING": QueueState(State.RUNNING),
    "STAGE_OUT": QueueState(State.STOPPING, "Slurm copies its files"),
    "SUSPENDED": QueueState(
        State.INTERRUPTED, "suspended by Slurm; it continues when its nodes are free"
    ),
    "STOPPED": QueueState(State.INTERRUPTED, "its processes are stopped (SIGSTOP)"),
    "REQUEUED": QueueState(State.QUEUED, "queued again"),
    "REQUEUE_FED": QueueState(State.QUEUED, "queued again"),
    "REQUEUE_HOLD": QueueState(
        State.QUEUED, "held when it was queued again", _RELEASE, is_stuck=True
    ),
    "SPECIAL_EXIT": QueueState(
        State.QUEUED, "held when it was queued again", _RELEASE, is_stuck=True
    ),
    "RESV_DEL_HOLD": QueueState(
        State.QUEUED, "held: its reservation was deleted", _RELEASE, is_stuck=True
    ),
    "COMPLETED": QueueState(
        State.FAILED,
        "Slurm's job has ended, and the run has recorded no end",
        "see slurm.log in the run's folder",
        End.COMPLETED,
    ),
    "TIMEOUT": QueueState(
        State.STOPPED,
        "Slurm's time limit ended the job",
        end=End.TIME_LIMIT,
    ),
    "DEADLINE": QueueState(
        State.STOPPED,
        "Slurm ended the job at its deadline",
        "submit without --deadline",
        End.TIME_LIMIT,
    ),
    "PREEMPTED": QueueState(
        State.STOPPED,
        "preempted by a job of a higher priority, and not queued again",
        end=End.PREEMPTED,
    ),
    "NODE_FAIL": QueueState(
        State.FAILED,
        "a node of the job failed, and Slurm did not queue it again",
        end=End.NODE_FAILED,
    ),
    "BOOT_FAIL": QueueState(
        State.FAILED,
        "a node of the job could not be started",
        f"submit again, or {_ASK}",
        End.NOT_STARTED,
    ),
    "OUT_OF_MEMORY": QueueState(
        State.FAILED,
        "the processes used more memory than Slurm gave the job",
        end=End.OUT_OF_MEMORY,
    ),
    "REVOKED": QueueState(
        State.STOPPED, "another cluster of the federation runs the job", end=End.CANCELLED
    ),
    "LAUNCH_FAILED": QueueState(
        State.FAILED,
        "Slurm could not start the job on its nodes",
        f"do the nodes see the run's folder? cloudtrain check tries it; else {_ASK}",
        End.NOT_STARTED,
    ),
}

_LAUNCH_REASONS = ("joblaunchfailure", "launch", "prolog", "systemfailure")
_SIGKILL = 9
_NO_START = 53
"""Slurm's own number instead of a signal: the node could not open the log, or change to the folder."""


def describe_job(job: SlurmJob, now: datetime | None = None) -> QueueState:
    """Return the state of a job in words.

    Args:
        job: The job, as squeue, scontrol or sacct describes it.
        now: The time, for expected starts.
    """
    if job.state == "PENDING":
        return _describe_waiting(job, now or datetime.now(UTC))
    if "COMPLETING" in job.flags:
        return _STATES["COMPLETING"]
    if job.state == "CANCELLED":
        return _describe_cancelled(job)
    if job.state == "FAILED":
        return _describe_failed(job)
    found = _STATES.get(job.state)
    if found is None:
        return QueueState(State.UNKNOWN, f"Slurm reports the state {job.state}")
    return _with_id(found, job)


def _describe_waiting(job: SlurmJob, now: datetime) -> QueueState:
    reason = _waiting_reason(job.reason)
    words = reason.words
    if job.start is not None and job.start > now and not reason.is_stuck:
        when = describe_time(job.start, now)
        is_requeued = job.reason == "BeginTime" and job.restarts
        if is_requeued:
            words = f"queued again; Slurm starts it at {when} or later"
        elif job.reason == "BeginTime":
            words = f"waiting until {when}, its begin time"
        else:
            words = f"{words}; Slurm expects {when}"
    state = QueueState(State.QUEUED, words, reason.hint, is_stuck=reason.is_stuck)
    return _with_id(state, job)


def _waiting_reason(given: str) -> _Reason:
    """Return what a reason means, such as `ReqNodeNotAvail, UnavailableNodes:n1` with `_` or spaces."""
    # scontrol writes underscores for spaces.
    text = given.replace("_", " ").strip()
    if text.startswith("("):
        text = text.strip("()")
    first = text.replace(",", " ").partition(" ")[0].lower()
    known = _WAITING.get(first)
    if known is None:
        # Slurm writes some in words, such as `Job's account not permitted to use this partition (...)`.
        words = text.lower()
        known = next((each for start, each in _IN_WORDS.items() if words.startswith(start)), None)
    if known is not None:
        return known
    is_limit = first.startswith(("assoc", "qos"))
    if is_limit:
        owner = "the QOS" if first.startswith("qos") else "the account"
        see = (
            "sacctmgr show qos"
            if first.startswith("qos")
            else "sacctmgr show associations user=$USER"
        )
        if "perjob" in first:
            return _Reason(
                f"it asks for more than a job of {owner} may have ({text})",
                f"see: {see}",
                is_stuck=True,
            )
        return _Reason(f"waiting: a limit of {owner} is reached ({text})", f"see: {see}")
    return _Reason(f"waiting; Slurm gives the reason {text}")


def _describe_cancelled(job: SlurmJob) -> QueueState:
    if job.cancelled_by is None:
        return QueueState(State.STOPPED, "cancelled in Slurm (scancel)", end=End.CANCELLED)
    if job.cancelled_by == os.getuid():
        return QueueState(State.STOPPED, "cancelled by you (scancel)", end=End.CANCELLED_BY_USER)
    who = _user_name(job.cancelled_by)
    return QueueState(
        State.STOPPED,
        f"cancelled by {who} (scancel)",
        end=End.CANCELLED_BY_OTHER,
    )


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):
        return f"the user with the id {number}"


def _describe_failed(job: SlurmJob) -> QueueState:
    is_signalled = job.exit_signal is not None and 0 < job.exit_signal < _NO_START
    # Slurm gives the same reason for a script that a signal has ended.
    if job.exit_signal == _NO_START or (
        not is_signalled and job.reason.lower().startswith(_LAUNCH_REASONS)
    ):
        return _STATES["LAUNCH_FAILED"]
    hint = "see slurm.log in the run's folder"
    if job.exit_signal == _SIGKILL:
        return QueueState(
            State.FAILED,
            "the batch script was killed (SIGKILL)",
            f"often for too little memory on the node; {hint}",
            End.FAILED,
        )
    if job.exit_signal:
        return QueueState(
            State.FAILED, f"signal {job.exit_signal} ended the batch script", hint, End.FAILED
        )
    code = "" if job.exit_status is None else f" with exit code {job.exit_status}"
    return QueueState(State.FAILED, f"the batch script failed{code}", hint, End.FAILED)


def _with_id(state: QueueState, job: SlurmJob) -> QueueState:
    if "{id}" not in state.hint:
        return state
    hint = state.hint.replace("{id}", job.id)
    return QueueState(state.state, state.reason, hint, state.end, state.is_stuck)


def describe_time(moment: datetime, now: datetime) -> str:
    """Return a time as squeue shows it, in this machine's zone: `14:05 CET`, with the date unless it is today."""
    local = moment.astimezone()
    if local.date() == now.astimezone().date():
        return f"{local:%H:%M %Z}"
    return f"{local:%Y-%m-%d %H:%M %Z}"
