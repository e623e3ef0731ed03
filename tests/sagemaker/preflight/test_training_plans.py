"""Checks of training plans and of the rule that sends notifications."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.aws_frontend import Answer, Front
from support.preflight import Checks, client, only_failure

from cloudtrain.support.checks import Result

PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
OVERRIDES = (
    "cluster.instance_type=ml.p5.48xlarge",
    f"cluster.training_plan={PLAN}",
    "limits.runtime=10h",
)
TOPIC = "arn:aws:sns:us-west-2:123456789012:training"
HOUR = 3600


def training_plan(**changes: Any) -> dict[str, Any]:
    """Return a plan as DescribeTrainingPlan returns it: eight instances until in two days."""
    now = time.time()
    block = {
        "ReservedCapacityArn": f"{PLAN.replace('training-plan', 'reserved-capacity')}",
        "Status": "Active",
    }
    return {
        "TrainingPlanArn": PLAN,
        "TrainingPlanName": "november",
        "Status": "Active",
        "TargetResources": ["training-job"],
        "StartTime": now - HOUR,
        "EndTime": now + 48 * HOUR,
        "AvailableInstanceCount": 8,
        "ReservedCapacitySummaries": [
            {**block, "InstanceType": "ml.p5.48xlarge", "TotalInstanceCount": 8}
        ],
        **changes,
    }


def test_a_training_plan_with_room_passes(account: Front, checks: Checks) -> None:
    account.respond("DescribeTrainingPlan", Answer.json(training_plan()))
    found = checks(*OVERRIDES)
    assert found["training plan"].result is Result.PASS, found["training plan"]
    assert "november has 2 x ml.p5.48xlarge until 20" in found["training plan"].detail
    assert not found["training plan"].warning
    assert found["quota"].detail == "the training plan has reserved the instances"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"Status": "Expired"}, "november is Expired"),
        (
            {"TargetResources": ["hyperpod-cluster"]},
            "november is for hyperpod-cluster, not for training jobs",
        ),
        (
            {"ReservedCapacitySummaries": []},
            "november has no instances, the job needs 2 x ml.p5.48xlarge",
        ),
        ({"EndTime": time.time() - HOUR}, "november ended at 20"),
    ],
)
def test_an_unusable_training_plan_fails(
    account: Front, checks: Checks, changes: dict[str, Any], detail: str
) -> None:
    account.respond("DescribeTrainingPlan", Answer.json(training_plan(**changes)))
    assert detail in only_failure(checks(*OVERRIDES), "training plan").detail


def test_more_instances_than_the_training_plan_has(account: Front, checks: Checks) -> None:
    account.respond("DescribeTrainingPlan", Answer.json(training_plan()))
    failure = only_failure(checks(*OVERRIDES, "cluster.instances=9"), "training plan")
    assert "november has 8 x ml.p5.48xlarge, the job needs 9 x ml.p5.48xlarge" in failure.detail


def test_a_missing_training_plan(account: Front, checks: Checks) -> None:
    account.respond("DescribeTrainingPlan", Answer.denied("ResourceNotFound"))
    failure = only_failure(checks(*OVERRIDES), "training plan")
    assert failure.detail == "there is no training plan november in us-west-2"
    assert "aws sagemaker list-training-plans" in failure.fix


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (
            {"EndTime": time.time() + 5 * HOUR},
            "hours after the earliest start and before limits.runtime",
        ),
        (
            {"AvailableInstanceCount": 1},
            "november has 1 free instances now: the job waits for the others",
        ),
        ({"Status": "Scheduled", "StartTime": time.time() + HOUR}, ""),
    ],
)
def test_a_training_plan_that_delays_or_ends_a_job(
    account: Front, checks: Checks, changes: dict[str, Any], warning: str
) -> None:
    account.respond("DescribeTrainingPlan", Answer.json(training_plan(**changes)))
    found = checks(*OVERRIDES)["training plan"]
    assert found.result is Result.PASS
    assert warning in found.warning
    assert found.is_shown == (changes.get("Status") == "Scheduled")


def test_a_training_plan_of_a_preferred_type(account: Front, checks: Checks) -> None:
    account.respond("DescribeTrainingPlan", Answer.json(training_plan()))
    entry = f"{{instance_type: ml.p5.48xlarge, instances: 2, training_plan: '{PLAN}'}}"
    found = checks(f"cluster={{prefer: [{entry}, ml.p4d.24xlarge], instances: 2}}")
    assert found["training plan"].result is Result.PASS
    assert "ml.p4d.24xlarge for training job usage: 0 of 8 in use" in found["quota"].detail


def test_a_notification_without_a_rule_is_a_warning(account: Front, checks: Checks) -> None:
    found = checks(f"notify.sns={TOPIC}")["notify"]
    assert found.result is Result.PASS
    assert f"no EventBridge rule sends to {TOPIC}: apply infra/" in found.warning
    events = client("events")
    events.put_rule(Name="cloudtrain-notify", EventPattern='{"source": ["aws.sagemaker"]}')
    events.put_targets(Rule="cloudtrain-notify", Targets=[{"Id": "topic", "Arn": TOPIC}])
    found = checks(f"notify.sns={TOPIC}")["notify"]
    assert (found.detail, found.warning) == (f"the rule cloudtrain-notify sends to {TOPIC}", "")


def test_an_image_outside_of_ecr_is_not_checked(account: Front, checks: Checks) -> None:
    found = checks(
        "cluster.image=public.ecr.aws/deep-learning-containers/pytorch:2.13-cpu-amzn2023"
    )["image"]
    assert found.result is Result.UNKNOWN
    assert "is in a registry that AWS cannot be asked about" in found.detail
