"""Checks of an AWS Batch queue."""

from __future__ import annotations

from typing import Any

import pytest
from support.aws_frontend import Answer, Front, simulation
from support.preflight import ACCOUNT, Checks, only_failure

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws

QUEUE = {
    "jobQueueName": "ml",
    "jobQueueArn": f"arn:aws:batch:us-west-2:{ACCOUNT}:job-queue/ml",
    "state": "ENABLED",
    "status": "VALID",
    "priority": 1,
    "computeEnvironmentOrder": [],
    "serviceEnvironmentOrder": [{"order": 1, "serviceEnvironment": "env"}],
    "jobQueueType": "SAGEMAKER_TRAINING",
}

POLICY = {"schedulingPolicyArn": f"arn:aws:batch:us-west-2:{ACCOUNT}:scheduling-policy/p"}


def serve_queues(front: Front, queues: list[dict[str, Any]], unit: str = "NUM_INSTANCES") -> None:
    front.respond("POST /v1/describejobqueues", Answer.json({"jobQueues": queues}))
    limits = [{"capacityUnit": unit, "maxCapacity": 2}]
    environment = {
        "serviceEnvironmentName": "env",
        "serviceEnvironmentArn": "env",
        "serviceEnvironmentType": "SAGEMAKER_TRAINING",
        "capacityLimits": limits,
    }
    front.respond(
        "POST /v1/describeserviceenvironments", Answer.json({"serviceEnvironments": [environment]})
    )


@pytest.mark.parametrize(
    ("queue", "changes", "detail"),
    [
        ("ml", {}, "ml accepts jobs, first in, first out"),
        (
            "{name: ml, priority: 3}",
            {},
            "ml accepts jobs, first in, first out; it ignores the priority",
        ),
        ("{name: ml, share: a}", POLICY, "ml accepts jobs, ordered by shares and priority"),
        ("{name: ml, quota_share: a}", POLICY, "ml accepts jobs, ordered by shares and priority"),
    ],
)
def test_a_queue_that_accepts_the_job(
    account: Front, checks: Checks, queue: str, changes: dict[str, Any], detail: str
) -> None:
    serve_queues(account, [{**QUEUE, **changes}])
    found = checks(f"cluster.queue={queue}")
    assert {name for name, each in found.items() if each.result is not Result.PASS} == set()
    assert found["queue"].detail == detail
    assert found["queue capacity"].detail == "ml has capacity for 2 instances, the job needs 2"


@pytest.mark.parametrize(
    ("queue", "changes", "detail"),
    [
        ("ml", {"jobQueueType": "ECS"}, "ml is of type ECS and accepts no training jobs"),
        ("ml", {"state": "DISABLED"}, "ml accepts no jobs: DISABLED, VALID"),
        (
            "ml",
            {"status": "INVALID", "statusReason": "broken"},
            "ml accepts no jobs: ENABLED, INVALID broken",
        ),
        ("ml", POLICY, "ml has a scheduling policy and accepts no job without a share"),
        ("{name: ml, share: a}", {}, "ml has no scheduling policy and accepts no job with a share"),
        (
            "{name: ml, quota_share: a}",
            {},
            "ml has no scheduling policy and accepts no job with a share",
        ),
    ],
)
def test_a_queue_that_rejects_the_job(
    account: Front, checks: Checks, queue: str, changes: dict[str, Any], detail: str
) -> None:
    serve_queues(account, [{**QUEUE, **changes}])
    assert only_failure(checks(f"cluster.queue={queue}"), "queue").detail == detail


def test_a_queue_that_is_missing_or_too_small(account: Front, checks: Checks) -> None:
    assert not {"queue", "queue capacity"} & set(checks())
    assert not any("/v1/" in name for name in account.seen)
    serve_queues(account, [])
    found = checks("cluster.queue=ml")
    assert "there is no job queue ml in us-west-2" in only_failure(found, "queue").detail
    assert found["queue capacity"].result is Result.UNKNOWN
    serve_queues(account, [QUEUE])
    failure = only_failure(checks("cluster.queue=ml", "cluster.instances=3"), "queue capacity")
    assert failure.detail == "ml has capacity for 2 instances, the job needs 3"
    assert failure.fix.startswith("--instances 2")
    serve_queues(account, [QUEUE], unit="ml.m5.xlarge")
    assert checks("cluster.queue=ml")["queue capacity"].result is Result.UNKNOWN


def test_a_queue_without_permission_is_unknown(account: Front, checks: Checks) -> None:
    account.respond("POST /v1/describejobqueues", Answer.denied())
    found = checks("cluster.queue=ml")
    assert found["queue"].result is found["queue capacity"].result is Result.UNKNOWN
    assert found["queue"].fix == "grant batch:DescribeJobQueues to these credentials"


def test_what_the_caller_and_the_role_need_for_a_queue(account: Front, checks: Checks) -> None:
    serve_queues(account, [QUEUE])
    account.rules["SimulatePrincipalPolicy"] = simulation(
        {"batch:SubmitServiceJob": "implicitDeny"}
    )
    failure = only_failure(checks("cluster.queue=ml"), "caller")
    assert (
        f"batch:SubmitServiceJob on arn:aws:batch:us-west-2:{ACCOUNT}:job-queue/ml"
        in failure.detail
    )
    account.rules["SimulatePrincipalPolicy"] = simulation({"logs:PutLogEvents": "implicitDeny"})
    assert (
        ":log-stream:AWSBatchdemo-"
        in only_failure(checks("cluster.queue=ml"), "permissions").detail
    )
