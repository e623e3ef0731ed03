"""States and reasons of Slurm in words; tests/slurm/test_commands.py compares them with a real Slurm."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cloudtrain.backends.slurm.queue_states import End, QueueState, describe_job
from cloudtrain.backends.slurm.slurm_output import SlurmJob
from cloudtrain.runs.status import State

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def describe(state: str = "PENDING", reason: str = "", **fields: Any) -> QueueState:
    return describe_job(
        SlurmJob(id="7", name="x", comment="", state=state, reason=reason, **fields), NOW
    )


def test_a_waiting_job_says_when_slurm_expects_it() -> None:
    start = NOW + timedelta(minutes=5)
    when = f"{start.astimezone():%H:%M %Z}"
    assert (
        describe(reason="Resources", start=start).reason
        == f"waiting for resources; Slurm expects {when}"
    )
    assert describe(reason="Resources").reason == "waiting for resources"
    assert (
        describe(reason="BeginTime", start=start).reason == f"waiting until {when}, its begin time"
    )
    again = describe(reason="BeginTime", start=start, restarts=1).reason
    assert again == f"queued again; Slurm starts it at {when} or later"
    assert "2026-12-02" in describe(reason="Priority", start=NOW + timedelta(days=2)).reason


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("DependencyNeverSatisfied", "never starts"),
        ("JobHeldUser", "held by its user"),
        ("JobHeldAdmin", "held by an administrator"),
        ("launch failed requeued held", "could not start it"),
        ("launch_failed_requeued_held", "could not start it"),
        ("InvalidAccount", "account is not valid"),
        ("PartitionTimeLimit", "longer than its partition allows"),
        ("QOSMaxWallDurationPerJobLimit", "more than a job of the QOS may have"),
    ],
)
def test_a_job_that_never_starts_says_so(reason: str, words: str) -> None:
    found = describe(reason=reason, start=NOW + timedelta(hours=1))
    assert found.state is State.QUEUED
    assert words in found.reason
    assert "expects" not in found.reason
    assert found.is_stuck
    assert found.hint


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained or reserved"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "down, drained or reserved"),
        ("AssocGrpGRES", "a limit of the account is reached (AssocGrpGRES)"),
        ("QOSMaxJobsPerUserLimit", "a limit of the QOS is reached"),
        ("NewReasonOfTomorrow", "Slurm gives the reason NewReasonOfTomorrow"),
    ],
)
def test_other_reasons_are_waits(reason: str, words: str) -> None:
    found = describe(reason=reason)
    assert words in found.reason
    assert not found.is_stuck


@pytest.mark.parametrize(
    ("state", "end", "run_state"),
    [
        ("TIMEOUT", End.TIME_LIMIT, State.STOPPED),
        ("PREEMPTED", End.PREEMPTED, State.STOPPED),
        ("NODE_FAIL", End.NODE_FAILED, State.FAILED),
        ("OUT_OF_MEMORY", End.OUT_OF_MEMORY, State.FAILED),
        ("BOOT_FAIL", End.NOT_STARTED, State.FAILED),
        ("COMPLETED", End.COMPLETED, State.FAILED),
        ("CANCELLED", End.CANCELLED, State.STOPPED),
    ],
)
def test_ends_are_different(state: str, end: End, run_state: State) -> None:
    found = describe(state)
    assert (found.end, found.state) == (end, run_state)
    assert found.reason


def test_who_cancelled_is_named() -> None:
    assert describe("CANCELLED", cancelled_by=os.getuid()).end is End.CANCELLED_BY_USER
    other = describe("CANCELLED", cancelled_by=4_000_000_000)
    assert other.end is End.CANCELLED_BY_OTHER
    assert "the user with the id 4000000000" in other.reason


def test_the_ends_of_a_batch_script_are_different() -> None:
    assert "exit code 3" in describe("FAILED", exit_status=3, exit_signal=0).reason
    killed = describe("FAILED", exit_status=0, exit_signal=9)
    assert "killed" in killed.reason
    assert "memory" in killed.hint
    assert "signal 11" in describe("FAILED", exit_status=0, exit_signal=11).reason
    assert describe("FAILED", "JobLaunchFailure").end is End.NOT_STARTED


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("RUNNING", State.RUNNING),
        ("CONFIGURING", State.STARTING),
        ("COMPLETING", State.STOPPING),
        ("SUSPENDED", State.INTERRUPTED),
        ("REQUEUED", State.QUEUED),
        ("NEW_STATE", State.UNKNOWN),
    ],
)
def test_states_before_the_end(state: str, expected: State) -> None:
    found = describe(state)
    assert (found.state, found.end) == (expected, None)


def test_a_job_that_ends_is_stopping() -> None:
    assert describe("RUNNING", flags=frozenset({"COMPLETING"})).state is State.STOPPING
