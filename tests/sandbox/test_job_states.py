"""States of training jobs with a manual clock, and fault plans."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from support.jobs import until

from cloudtrain.backends.sandbox import training_job
from cloudtrain.backends.sandbox.fault_injection import FaultInjector, FaultPlan
from cloudtrain.backends.sandbox.job_runner import JobRunner, RunnerEnvironment
from cloudtrain.backends.sandbox.training_job import TrainingJob
from cloudtrain.errors import UserError

REQUEST = {
    "TrainingJobName": "job",
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 10},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out/"},
    "Tags": [{"Key": "a", "Value": "b"}],
}


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _job(**fields: Any) -> tuple[TrainingJob, Clock]:
    clock = Clock()
    return TrainingJob({**REQUEST, **fields}, clock), clock


def _advance(job: TrainingJob, clock: Clock, *steps: tuple[float, str]) -> None:
    for seconds, status in steps:
        clock.now += seconds
        job.enter(status)


def test_time_counts_on_instances_only_and_spot_costs_less() -> None:
    job, clock = _job(EnableManagedSpotTraining=True)
    _advance(
        job, clock, (5, "Pending"), (55, "Downloading"), (10, "Training"), (100, "Interrupted")
    )
    assert job.status == "InProgress"
    _advance(job, clock, (7, "Starting"), (500, "Downloading"), (10, "Training"))
    clock.now += 30
    assert job.training_seconds == 150
    _advance(job, clock, (20, "Uploading"), (30, "Completed"))
    description = job.describe()
    assert description["TrainingTimeInSeconds"] == 110 + 90
    assert description["BillableTimeInSeconds"] == 200 * training_job.SPOT_PRICE_RATIO
    assert description["TrainingStartTime"] == 1060
    assert description["TrainingEndTime"] == clock.now
    assert (
        description["ModelArtifacts"]["S3ModelArtifacts"]
        == "s3://bucket/out/job/output/model.tar.gz"
    )
    assert all(
        one["EndTime"] == other["StartTime"]
        for one, other in pairwise(description["SecondaryStatusTransitions"])
    )
    assert "Tags" not in description


def test_a_stopped_job_is_stopping_until_its_end() -> None:
    job, clock = _job()
    _advance(job, clock, (1, "Downloading"), (1, "Training"), (1, "Stopping"))
    assert job.status == "Stopping"
    _advance(job, clock, (1, "Uploading"))
    assert (job.status, job.secondary) == ("Stopping", "Uploading")
    _advance(job, clock, (1, "MaxRuntimeExceeded"))
    assert (job.status, job.secondary, job.is_final) == ("Stopped", "MaxRuntimeExceeded", True)


def test_every_status_is_in_awss_model() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")
    secondary = set(model.shape_for("SecondaryStatus").enum)
    assert set(training_job._ENDS.values()) <= set(model.shape_for("TrainingJobStatus").enum)  # noqa: SLF001
    assert set(training_job._MESSAGES) <= secondary  # noqa: SLF001


def _waiting(tmp_path: Path, plan: FaultPlan, kind: str) -> tuple[TrainingJob, Clock]:
    limits = {"MaxRuntimeInSeconds": 10, "MaxPendingTimeInSeconds": 1800}
    job, clock = _job(
        StoppingCondition=limits, ResourceConfig={"InstanceType": kind, "InstanceCount": 1}
    )
    JobRunner(
        job,
        RunnerEnvironment(
            folder=tmp_path,
            endpoints=tmp_path,
            file_systems=tmp_path,
            environment={},
            s3=None,
            logs=None,
            cloudwatch=None,
            faults=FaultInjector(plan),
        ),
    ).start()
    until(lambda: job.secondary == "Pending")
    return job, clock


def test_a_job_that_exceeds_max_pending_is_stopped(tmp_path: Path) -> None:
    job, clock = _waiting(tmp_path, FaultPlan(capacity_after_seconds=10**6), "ml.g5.xlarge")
    clock.now += 1800
    until(lambda: job.is_final)
    assert [entry["Status"] for entry in job.describe()["SecondaryStatusTransitions"]] == [
        *("Starting", "Pending", "Stopping", "Stopped")
    ]
    assert "ModelArtifacts" not in job.describe()


def test_max_pending_applies_to_accelerated_types_only(tmp_path: Path) -> None:
    job, clock = _waiting(tmp_path, FaultPlan(capacity_after_seconds=10**6), "ml.m5.large")
    clock.now += 1800
    job.is_stop_requested.wait(0.5)  # the runner polls several times
    assert job.secondary == "Pending"
    job.is_stop_requested.set()
    until(lambda: job.is_final)


def test_waited_seconds_backdates_a_new_job(tmp_path: Path) -> None:
    job, clock = _waiting(
        tmp_path, FaultPlan(capacity_after_seconds=10**6, waited_seconds=1790), "ml.g5.xlarge"
    )
    assert (
        job.describe()["CreationTime"]
        == job.describe()["SecondaryStatusTransitions"][0]["StartTime"]
        == -790
    )
    clock.now += 10
    until(lambda: job.is_final)


def test_faults_apply_by_count_or_by_seeded_probability() -> None:
    faults = FaultInjector(
        FaultPlan.from_document(
            {"throttle": {"A": 2}, "errors": {"*": 0.5}, "slow_seconds": {"A": 1}}
        )
    )
    fails = ["throttle" in faults.next_fault("A").kinds for _ in range(4)]
    assert fails == [True, True, False, False]
    assert faults.next_fault("A").slow_seconds == 1
    assert "throttle" not in faults.next_fault("B").kinds

    def failures(seed: int) -> list[bool]:
        faults = FaultInjector(FaultPlan.from_document({"seed": seed, "errors": {"*": 0.5}}))
        return ["errors" in faults.next_fault("A").kinds for _ in range(200)]

    assert failures(1) == failures(1) != failures(2)
    assert 60 < sum(failures(1)) < 140


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"capacity_after": 3}, 'did you mean "capacity_after_seconds"'),
        ({"interrupt_at_step": "x"}, "interrupt_at_step.*expected an integer"),
        ({"dead_instance": {"host": "algo-1"}}, "dead_instance.step: required field is missing"),
        ({"throttle": 3}, "throttle: expected a mapping"),
        ([], "must be a mapping"),
    ],
)
def test_mistakes_in_a_fault_plan_are_reported(document: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FaultPlan.from_document(document)
