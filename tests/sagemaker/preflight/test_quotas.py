"""Checks of quotas, warm pools and budgets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.aws_frontend import Answer, Front, Request, quotas
from support.preflight import ACCOUNT, ENOUGH, JOB, Checks, budget, only_failure, start_job

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws


def test_a_quota_of_zero(account: Front, checks: Checks) -> None:
    account.respond(
        "ListServiceQuotas", quotas({**ENOUGH, "ml.m5.xlarge for training job usage": 0})
    )
    failure = only_failure(checks(), "quota")
    assert failure.detail == "ml.m5.xlarge for training job usage: 0 in us-west-2, the job needs 2"
    assert re.fullmatch(
        r"aws service-quotas request-service-quota-increase --service-code sagemaker "
        r"--quota-code L-\w{8} --desired-value 2 --region us-west-2",
        failure.fix,
    )
    assert checks("cluster.spot=true")["quota"].result is Result.PASS


def test_the_default_quota_applies_without_another(account: Front, checks: Checks) -> None:
    account.respond("ListServiceQuotas", quotas({}))
    assert checks()["quota"].result is Result.UNKNOWN
    account.respond(
        "ListAWSDefaultServiceQuotas", quotas({"ml.m5.xlarge for training job usage": 1})
    )
    assert "1 in us-west-2, the job needs 2" in only_failure(checks(), "quota").detail


def test_the_quota_of_every_preference_must_cover_the_job(account: Front, checks: Checks) -> None:
    text = JOB.replace("instance_type: ml.m5.xlarge", "prefer: [ml.m5.xlarge, ml.m5.2xlarge]")
    values = {**ENOUGH, "ml.m5.2xlarge for training job usage": 8}
    account.respond("ListServiceQuotas", quotas(values))
    assert checks(text=text)["quota"].result is Result.PASS
    for name in ("ml.m5.xlarge", "ml.m5.2xlarge"):
        account.respond(
            "ListServiceQuotas", quotas({**values, f"{name} for training job usage": 1})
        )
        assert f"{name} for" in only_failure(checks(text=text), "quota").detail


def list_as_running(request: Request) -> Answer | None:
    """List two jobs as running, because in moto a job ends at once."""
    asked = json.loads(request.body)
    if asked.get("StatusEquals") != "InProgress":
        return Answer.json({"TrainingJobSummaries": []})
    summary = {
        "TrainingJobArn": f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:training-job/x",
        "CreationTime": 1.0,
    }
    names = ("busy", "spot")
    jobs = [
        {**summary, "TrainingJobName": name, "TrainingJobStatus": "InProgress"} for name in names
    ]
    return Answer.json({"TrainingJobSummaries": jobs})


def test_what_is_in_use_counts_by_kind(account: Front, checks: Checks) -> None:
    start_job("busy", 6)
    start_job("spot", 5, EnableManagedSpotTraining=True)
    account.rules["ListTrainingJobs"] = list_as_running
    assert "6 of 8 in use, the job needs 2" in checks()["quota"].detail
    failure = only_failure(checks("cluster.instances=3"), "quota")
    assert "aws sagemaker stop-training-job --training-job-name busy" in failure.fix
    assert "--desired-value 9" in failure.fix
    assert "5 of 8 in use" in checks("cluster.spot=true")["quota"].detail


def test_quota_is_checked_without_usage(account: Front, checks: Checks) -> None:
    account.respond("ListTrainingJobs", Answer.denied())
    found = checks()
    assert found["quota"].result is Result.PASS
    assert "could not be counted" in found["quota"].detail


def test_a_warm_pool_without_quota(account: Front, checks: Checks) -> None:
    assert "warm pool" not in checks()
    assert checks("cluster.keep_alive=30m")["warm pool"].result is Result.PASS
    account.respond(
        "ListServiceQuotas", quotas({**ENOUGH, "ml.m5.xlarge for training warm pool usage": 0})
    )
    assert (
        "would not be kept warm"
        in only_failure(checks("cluster.keep_alive=30m"), "warm pool").detail
    )


@pytest.mark.parametrize(
    ("quota", "value", "detail", "fix"),
    [
        (
            "Longest run time for a training job",
            3600,
            "3600, needed 86400 s",
            "or --set limits.runtime=3600s",
        ),
        (
            "Maximum number of instances per training job",
            1,
            "1, needed 2 instances",
            "--desired-value 2",
        ),
        (
            "Number of instances across all training jobs",
            4,
            "4, needed 8 instances",
            "--desired-value 8",
        ),
    ],
)
def test_a_quota_of_all_types(
    account: Front, checks: Checks, quota: str, value: int, detail: str, fix: str
) -> None:
    start_job("busy", 6)
    account.rules["ListTrainingJobs"] = list_as_running
    start_job("spot", 5, EnableManagedSpotTraining=True)
    account.respond("ListServiceQuotas", quotas({**ENOUGH, quota: value}))
    failure = only_failure(checks(), "job quotas")
    assert f"{quota}: {detail}" in failure.detail
    assert fix in failure.fix


def test_spot_has_a_quota_of_instances_of_its_own(account: Front, checks: Checks) -> None:
    lowered = {
        "Maximum number of instances per training job": 1,
        "Number of instances across all training jobs": 0,
    }
    account.respond("ListServiceQuotas", quotas({**ENOUGH, **lowered}))
    assert checks("cluster.spot=true")["job quotas"].result is Result.PASS
    account.respond(
        "ListServiceQuotas",
        quotas({**ENOUGH, "Maximum number of instances per spot training job": 1}),
    )
    assert "1, needed 2" in only_failure(checks("cluster.spot=true"), "job quotas").detail


def test_a_quota_that_aws_does_not_list_is_unknown(account: Front, checks: Checks) -> None:
    listed = {name: value for name, value in ENOUGH.items() if not name.startswith("Longest")}
    account.respond("ListServiceQuotas", quotas(listed))
    found = checks()["job quotas"]
    assert found.result is Result.UNKNOWN
    assert "'Longest run time for a training job'" in found.detail


def with_pools(*names: str) -> Callable[[Request], Answer | None]:
    """Return a rule for ListTrainingJobs that lists the warm pools of these jobs as available, and nothing else."""

    def answer(request: Request) -> Answer | None:
        asked = json.loads(request.body)
        summary = {
            "TrainingJobArn": f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:training-job/x",
            "CreationTime": 1.0,
        }
        ended = {"TrainingJobStatus": "Completed", "WarmPoolStatus": {"Status": "Available"}}
        jobs = [{**summary, **ended, "TrainingJobName": name} for name in names]
        return Answer.json(
            {"TrainingJobSummaries": jobs if "WarmPoolStatusEquals" in asked else []}
        )

    return answer


def pool(name: str, **resources: Any) -> dict[str, Any]:
    cluster = {"InstanceType": "ml.m5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
    return {
        "TrainingJobName": name,
        "TrainingJobStatus": "Completed",
        "TrainingEndTime": time.time(),
        "RoleArn": f"arn:aws:iam::{ACCOUNT}:role/training",
        "ResourceConfig": {**cluster, "KeepAlivePeriodInSeconds": 600, **resources},
        "WarmPoolStatus": {"Status": "Available"},
    }


def describe(*pools: dict[str, Any]) -> Callable[[Request], Answer | None]:
    """Return a rule for DescribeTrainingJob."""
    known = {each["TrainingJobName"]: each for each in pools}
    return lambda request: Answer.json(known[json.loads(request.body)["TrainingJobName"]])


def test_warm_start_is_reported(account: Front, checks: Checks) -> None:
    assert "warm start" not in checks()
    found = checks("cluster.keep_alive=30m")["warm start"]
    assert (found.result, found.detail) == (
        Result.PASS,
        "no warm pool is available: the cluster starts cold",
    )
    account.rules["ListTrainingJobs"] = with_pools("first", "second")
    account.rules["DescribeTrainingJob"] = describe(
        pool("first", VolumeSizeInGB=50), pool("second", InstanceCount=3)
    )
    detail = checks("cluster.keep_alive=30m")["warm start"].detail
    assert detail.endswith(
        "pool of first (the nearest of 2) differs in cluster.volume (50, the job has 30)"
    )
    account.rules["DescribeTrainingJob"] = describe(
        pool("first", VolumeSizeInGB=50), pool("second")
    )
    detail = checks("cluster.keep_alive=30m")["warm start"].detail
    assert re.fullmatch(r"reuses the warm pool of second, kept until \d\d:\d\d UTC", detail)
    account.respond("ListTrainingJobs", Answer.denied())
    assert checks("cluster.keep_alive=30m")["warm start"].result is Result.UNKNOWN


def test_a_reused_pool_does_not_count_towards_the_quota(account: Front, checks: Checks) -> None:
    account.respond(
        "ListServiceQuotas", quotas({**ENOUGH, "ml.m5.xlarge for training job usage": 3})
    )
    account.rules["ListTrainingJobs"] = with_pools("first", "second")
    account.rules["DescribeTrainingJob"] = describe(
        pool("first"), pool("second", InstanceCount=1, VolumeSizeInGB=1)
    )
    assert "1 of 3 in use, the job needs 2" in checks("cluster.keep_alive=30m")["quota"].detail
    account.rules["DescribeTrainingJob"] = describe(pool("first"), pool("second"))
    assert "2 of 3 in use" in only_failure(checks("cluster.keep_alive=30m"), "quota").detail


def test_a_quota_without_permission_is_unknown(account: Front, checks: Checks) -> None:
    account.respond("ListServiceQuotas", Answer.denied())
    found = checks()
    assert found["quota"].result is Result.UNKNOWN
    assert found["quota"].fix == "grant servicequotas:ListServiceQuotas to these credentials"


@pytest.mark.parametrize(
    ("found", "result", "text"),
    [
        (budget(1000, 10), "pass", "990.00 of 1,000.00 USD monthly left"),
        (budget(100, 95), "fail", 'limits.cost=5 USD"'),
        (budget(100, 120), "fail", "wait, or raise it"),
        (
            budget(100, 95, CostFilters={"Service": ["Amazon SageMaker"]}),
            "fail",
            "limits.cost=5 USD",
        ),
        (
            budget(100, 95, CostFilters={"Service": ["Amazon Elastic Compute Cloud - Compute"]}),
            "pass",
            "no budget",
        ),
        (budget(100, 95, CostFilters={"TagKeyValue": ["user:team$vision"]}), "pass", "no budget"),
    ],
)
def test_budgets(
    account: Front, checks: Checks, found: dict[str, Any], result: str, text: str
) -> None:
    account.respond("DescribeBudgets", Answer.json({"Budgets": [found]}))
    # The estimate of 2 x 0.23 USD per hour for 24 hours and 238 seconds is 11.08 USD.
    check = checks()["budget"]
    assert check.result == result
    assert text in check.detail + check.fix
