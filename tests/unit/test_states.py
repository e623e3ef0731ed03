"""State, reason and advice for every description of a training job that SageMaker can return."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import botocore.session
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.backends.sagemaker.billing import read_billing
from cloudtrain.backends.sagemaker.job_states import (
    map_state,
    read_deadline,
    read_instances,
    read_phases,
    read_reason,
    read_state,
    read_waiting,
    seconds_on_instances,
)
from cloudtrain.catalog import bundled_prices
from cloudtrain.failure_rules import explain_run
from cloudtrain.runs.status import State, Status

BEGAN = datetime(2026, 11, 21, 7, 0, tzinfo=UTC)
NOW = BEGAN + timedelta(days=2)
MODEL = botocore.session.get_session().get_service_model("sagemaker")
LIMITS = {
    "MaxRuntimeInSeconds": 3600,
    "MaxWaitTimeInSeconds": 7200,
    "MaxPendingTimeInSeconds": 1800,
}


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def described(status: str, *passed: tuple[str, float], **fields: Any) -> dict[str, Any]:
    """Return DescribeTrainingJob's document of a job that passed through (secondary status, seconds)."""
    transitions, began, started = [], 0.0, None
    for name, seconds in passed:
        transitions.append(
            {
                "Status": name,
                "StartTime": at(began),
                "EndTime": at(began + seconds),
                "StatusMessage": name,
            }
        )
        started = began if name == "Downloading" and started is None else started
        began += seconds
    if status in ("InProgress", "Stopping") and transitions:
        del transitions[-1]["EndTime"]
    return {
        "TrainingJobStatus": status,
        "SecondaryStatus": passed[-1][0] if passed else "",
        "SecondaryStatusTransitions": transitions,
        "StoppingCondition": LIMITS,
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2},
        "CreationTime": BEGAN,
        **({"TrainingStartTime": at(started)} if started is not None else {}),
        **fields,
    }


QUEUED = (("Starting", 5), ("Pending", 95))
TRAINED = (*QUEUED, ("Downloading", 40), ("Training", 500))
RESUMED = (("Interrupted", 10), ("Starting", 5), ("Downloading", 40), ("Training", 500))


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        (
            described(
                "Stopped", *TRAINED, ("Stopping", 9), ("Uploading", 9), ("MaxRuntimeExceeded", 0)
            ),
            "STOPPED",
            "MaxRuntimeExceeded: the run reached its limit (1h)",
        ),
        # The last status does not name the limit, but an earlier transition does.
        (
            described(
                "Stopped", *TRAINED, ("MaxRuntimeExceeded", 9), ("Uploading", 9), ("Stopped", 0)
            ),
            "STOPPED",
            "MaxRuntimeExceeded: ",
        ),
        (
            described("Stopping", *TRAINED, ("MaxRuntimeExceeded", 9), ("Uploading", 9)),
            "STOPPING",
            "MaxRuntimeExceeded: ",
        ),
        # While the job stops, only the elapsed time shows that it reached the limit.
        (
            described(
                "Stopping", *QUEUED, ("Downloading", 40), ("Training", 3561), ("Stopping", 9)
            ),
            "STOPPING",
            "MaxRuntimeExceeded: ",
        ),
        (
            described(
                "Stopping",
                *QUEUED,
                ("Downloading", 40),
                ("Training", 3561),
                ("Stopping", 9),
                ("Uploading", 9),
            ),
            "STOPPING",
            "MaxRuntimeExceeded: ",
        ),
        (
            described(
                "Stopping",
                ("Starting", 7200),
                ("Stopping", 9),
                StoppingCondition={"MaxWaitTimeInSeconds": 7200},
            ),
            "STOPPING",
            "MaxWaitTimeExceeded: no spot capacity within cluster.spot.max_wait (2h), nothing was billed",
        ),
        (
            described("Stopped", ("Starting", 7200), ("Stopping", 9), ("MaxWaitTimeExceeded", 0)),
            "STOPPED",
            "MaxWaitTimeExceeded: no spot capacity within",
        ),
        (
            described(
                "Stopped", *TRAINED, *RESUMED, *RESUMED, ("Stopping", 9), ("MaxWaitTimeExceeded", 0)
            ),
            "STOPPED",
            "MaxWaitTimeExceeded: waiting and training together reached cluster.spot.max_wait (2h)",
        ),
        (
            described("Stopped", *TRAINED, ("Interrupted", 0)),
            "STOPPED",
            "interrupted: spot capacity was taken away and did not return",
        ),
        (
            described("Stopped", *TRAINED, ("Interrupted", 9), ("Stopped", 0)),
            "STOPPED",
            "interrupted: ",
        ),
        # A user stops a job that was interrupted before, or that waits for capacity. This is no interruption.
        (
            described("Stopped", *TRAINED, *RESUMED, ("Stopping", 9), ("Stopped", 0)),
            "STOPPED",
            "stopped by request",
        ),
        (
            described("Stopped", *TRAINED, ("Interrupted", 9), ("Stopping", 9), ("Stopped", 0)),
            "STOPPED",
            "stopped by request",
        ),
        (
            described("Stopped", *QUEUED, ("Stopping", 9), ("Stopped", 0)),
            "STOPPED",
            "stopped by request",
        ),
        (
            described(
                "Stopped", ("Starting", 5), ("Pending", 1796), ("Stopping", 9), ("Stopped", 0)
            ),
            "STOPPED",
            "MaxPendingTimeExceeded: no capacity within cluster.max_pending (30m), nothing was billed",
        ),
        # A status that botocore does not list yet.
        (
            described("Stopped", *QUEUED, ("MaxPendingTimeExceeded", 0)),
            "STOPPED",
            "MaxPendingTimeExceeded: ",
        ),
        (
            described(
                "Failed",
                *TRAINED,
                ("Failed", 0),
                FailureReason="CapacityError: Unable to provision",
            ),
            "FAILED",
            "CapacityError: ",
        ),
        (
            described(
                "Failed",
                *TRAINED,
                ("Failed", 0),
                FailureReason="InternalServerError: We encountered",
            ),
            "FAILED",
            "InternalServerError: ",
        ),
        (described("InProgress", *QUEUED), "QUEUED", "Pending"),
        (described("InProgress", *TRAINED), "RUNNING", "Training"),
        (described("InProgress", *TRAINED, ("Interrupted", 9)), "INTERRUPTED", "Interrupted"),
        (described("InProgress", *TRAINED, ("Interrupted", 9), *QUEUED), "INTERRUPTED", "Pending"),
        (
            described("InProgress", *TRAINED, ("Interrupted", 9), *QUEUED, ("Downloading", 9)),
            "STARTING",
            "Downloading",
        ),
        (
            described("InProgress", *TRAINED, ("Restarting", 9), ("Starting", 9)),
            "STARTING",
            "Starting",
        ),
        (
            described("Completed", *TRAINED, ("Uploading", 9), ("Completed", 0)),
            "SUCCEEDED",
            "Completed",
        ),
        (described("Deleting", *TRAINED, ("Completed", 0)), "SUCCEEDED", "Completed"),
        (described("Deleting", *TRAINED, ("Failed", 0), FailureReason="x"), "FAILED", "x"),
        (described("Deleting", *TRAINED, ("Stopped", 0)), "STOPPED", "stopped by request"),
    ],
)
def test_states_and_reasons(job: dict[str, Any], state: str, reason: str) -> None:
    assert str(read_state(job)) == state
    found = read_reason(job, NOW)
    assert found.startswith(reason), found
    status = Status("a-261121-070000-1a2b3c", "sagemaker", read_state(job), found)
    assert (status.exit_code == 5) == (state == "STOPPED")


def test_interruptions_are_counted_where_time_ran_out() -> None:
    job = described(
        "Stopped", *TRAINED, *RESUMED, *RESUMED, ("Stopping", 9), ("MaxWaitTimeExceeded", 0)
    )
    assert ", after 2 interruptions; raise it or remove cluster.spot, and resume" in read_reason(
        job, NOW
    )


def test_each_end_has_its_own_reason_and_explanation() -> None:
    ends = {
        "time_limit": described("Stopped", *TRAINED, ("MaxRuntimeExceeded", 0)),
        "spot": described("Stopped", *TRAINED, ("MaxWaitTimeExceeded", 0)),
        "spot too": described("Stopped", *TRAINED, ("Interrupted", 0)),
        "capacity": described("Stopped", ("Pending", 1800), ("Stopped", 0)),
        "None": described("Stopped", *TRAINED, ("Stopping", 9), ("Stopped", 0)),
    }
    reasons = {name: read_reason(job, NOW) for name, job in ends.items()}
    assert len(set(reasons.values())) == 5
    for name, reason in reasons.items():
        found = explain_run(
            Status("a-261121-070000-1a2b3c", "sagemaker", State.STOPPED, reason), ()
        )
        assert str(found.failure) == name.partition(" ")[0]
        assert found.action or name == "None"


names = st.sampled_from([*MODEL.shape_for("SecondaryStatus").enum, "NewerThanThis"])


@given(
    status=st.sampled_from(MODEL.shape_for("TrainingJobStatus").enum),
    passed=st.lists(st.tuples(names, st.floats(0, 10_000)), max_size=8),
    spot=st.booleans(),
    limits=st.fixed_dictionaries({}, optional={name: st.integers(1, 10_000) for name in LIMITS}),
)
def test_every_sequence_of_statuses_has_a_state(
    status: str, passed: list[tuple[str, float]], spot: bool, limits: dict[str, int]
) -> None:
    job = described(status, *passed, EnableManagedSpotTraining=spot, StoppingCondition=limits)
    state = read_state(job)
    assert isinstance(state, State)
    assert state.is_final == (status in ("Completed", "Failed", "Stopped", "Deleting"))
    if status == "Stopped":
        assert state is State.STOPPED
        assert read_reason(job, NOW)
    waiting = read_waiting(job)
    assert waiting is None or (waiting.types == ("ml.p4d.24xlarge",) and not state.is_final)
    assert read_deadline(job, NOW) is None or waiting is None
    assert 0 <= seconds_on_instances(read_phases(job), NOW) <= 2 * 86400 + 80_000
    assert state is not State.SUCCEEDED or "Completed" in (status, job["SecondaryStatus"])


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"BillableTimeInSeconds": 0}, 0),
        ({"BillableTimeInSeconds": 31}, 31),
        ({"TrainingEndTime": at(90)}, 40),
    ],
)
def test_an_ended_job_is_billed_what_aws_says(fields: dict[str, Any], seconds: int) -> None:
    """It may have been stopped before it had instances, which costs nothing, however long ago that was."""
    resources = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}
    passed = [("Starting", 50), ("Training", 40)]
    job = described("Stopped", *passed, ResourceConfig=resources, **fields)
    del job["SecondaryStatusTransitions"][-1]["EndTime"]
    assert read_billing(job, bundled_prices(), "us-west-2").billable_seconds == seconds


def test_waiting_has_types_and_a_deadline() -> None:
    preferred = [
        {"InstanceType": name, "InstanceCount": 4}
        for name in ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
    ]
    job = described("InProgress", *QUEUED, ResourceConfig={"InstancePreferences": preferred})
    waiting = read_waiting(job)
    assert waiting is not None
    assert (waiting.types, waiting.instances) == (("ml.p4d.24xlarge", "ml.p4de.24xlarge"), 4)
    assert (waiting.until, waiting.limit) == (at(1800), "cluster.max_pending")
    spot = read_waiting(
        described("InProgress", *TRAINED, ("Interrupted", 9), EnableManagedSpotTraining=True)
    )
    assert spot is not None
    assert (spot.until, spot.limit) == (at(7200), "cluster.spot.max_wait")
    # MaxPendingTimeInSeconds has no effect on types without accelerators (botocore's StoppingCondition).
    cpu = read_waiting(
        described(
            "InProgress",
            *QUEUED,
            ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1},
        )
    )
    assert cpu is not None
    assert cpu.until is None
    taken = {
        "InstancePreferences": preferred,
        "SelectedInstanceType": "ml.p4de.24xlarge",
        "SelectedInstanceCount": 4,
    }
    assert read_instances({"ResourceConfig": taken}) == 4
    assert read_waiting(described("InProgress", *TRAINED, ResourceConfig=taken)) is None


def test_the_deadline_follows_from_the_limits() -> None:
    job = described("InProgress", *TRAINED)
    assert read_deadline(job, at(640)) == at(640 + 3600 - 540)
    limits = {"MaxRuntimeInSeconds": 7100, "MaxWaitTimeInSeconds": 7200}
    spot = described(
        "InProgress", *TRAINED, EnableManagedSpotTraining=True, StoppingCondition=limits
    )
    assert read_deadline(spot, at(640)) == at(7200)
    assert read_deadline(described("InProgress", *QUEUED), NOW) is None


def test_every_pair_of_statuses_is_mapped() -> None:
    for status in MODEL.shape_for("TrainingJobStatus").enum:
        for secondary in MODEL.shape_for("SecondaryStatus").enum:
            assert map_state(status, secondary) in set(State)
