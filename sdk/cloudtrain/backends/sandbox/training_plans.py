"""The sandbox's training plan: reserved instances that a job can name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloudtrain.backends.sandbox.request_validation import ServiceError, validation_error
from cloudtrain.backends.sandbox.resources import arn_of
from cloudtrain.backends.sandbox.training_job import TrainingJob

PLAN = "cloudtrain-sandbox"
INSTANCES: Mapping[str, int] = {"ml.p4d.24xlarge": 4, "ml.p5.48xlarge": 4}
"""Reserved instances of the plan, by type."""
_DAY_SECONDS = 86400
_ARN = arn_of("training-plan", PLAN)


def plans_of(request: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield the training plans of a CreateTrainingJob request: ARN, instance type and count."""
    resources = request["ResourceConfig"]
    if "TrainingPlanArn" in resources:
        yield (
            resources["TrainingPlanArn"],
            str(resources.get("InstanceType")),
            int(resources.get("InstanceCount") or 0),
        )
    for each in resources.get("InstancePreferences", ()):
        count = int(each.get("InstanceCount") or resources.get("InstanceCount") or 0)
        yield from (
            (arn, str(each["InstanceType"]), count) for arn in each.get("TrainingPlanArns", ())
        )


def check_plans(request: Mapping[str, Any]) -> None:
    """Check that a request names the sandbox's training plan, and instances that it has.

    Raises:
        ServiceError: It names another plan, or more instances than the plan has.
    """
    for arn, instance_type, count in plans_of(request):
        if arn != _ARN:
            raise validation_error(f"Training plan {arn} not found.")
        if INSTANCES.get(instance_type, 0) < count:
            raise validation_error(
                f"Training plan {PLAN} does not have {count} instances of {instance_type}."
            )


def describe_plan(
    request: Mapping[str, Any], now: float, jobs: Iterable[TrainingJob]
) -> dict[str, Any]:
    """Return the response to DescribeTrainingPlan: an active plan from a day ago until in 30 days.

    Raises:
        ServiceError: There is no such plan.
    """
    if str(request.get("TrainingPlanName")) not in (PLAN, _ARN):
        raise ServiceError("ResourceNotFound", "Requested resource not found.")
    active = [job for job in jobs if not job.is_final]
    used = sum(
        job.cluster[1]
        for job in active
        if job.cluster[0] in {kind for _, kind, _ in plans_of(job.request)}
    )
    total = sum(INSTANCES.values())
    window = {"StartTime": now - _DAY_SECONDS, "EndTime": now + 30 * _DAY_SECONDS}
    return {
        "TrainingPlanArn": _ARN,
        "TrainingPlanName": PLAN,
        "Status": "Active",
        "TargetResources": ["training-job"],
        "TotalInstanceCount": total,
        "InUseInstanceCount": used,
        "AvailableInstanceCount": max(0, total - used),
        "ReservedCapacitySummaries": [
            {
                "ReservedCapacityArn": arn_of("reserved-capacity", f"{index:012d}"),
                "InstanceType": instance_type,
                "TotalInstanceCount": count,
                "Status": "Active",
                **window,
            }
            for index, (instance_type, count) in enumerate(INSTANCES.items())
        ],
        **window,
    }
