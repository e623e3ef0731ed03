"""`check` asks IAM for what the fields of a job need: on every resource, of the caller and of the role."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.aws_frontend import Answer, Front, simulation
from support.preflight import ACCOUNT, SCRIPT, Checks, only_failure
from support.simulated_access import asked, context_keys

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws

HERE = f"us-west-2:{ACCOUNT}"
PLAN = f"arn:aws:sagemaker:{HERE}:training-plan/november"
RESERVED = f"arn:aws:sagemaker:{HERE}:reserved-capacity/1a2b3c"
FUNCTION = f"arn:aws:lambda:{HERE}:function:registry"
NETWORK = "cluster.network={subnets: [subnet-1], security_groups: [sg-1]}"
PRIVATE = (
    f"cluster.image={{uri: 'registry.example.com/train:1', private_registry: {{credentials: '{FUNCTION}'}}}}",
    NETWORK,
)
WITH_PLAN = (
    f"cluster.training_plan={PLAN}",
    "cluster.instance_type=ml.p5.48xlarge",
    "cluster.instances=2",
)


def training_plan(**changes: Any) -> Answer:
    """Return a plan as DescribeTrainingPlan returns it: two reserved capacities until in two days."""
    now = datetime.now(UTC)
    summary = {"InstanceType": "ml.p5.48xlarge", "TotalInstanceCount": 8}
    capacities = [
        {**summary, "ReservedCapacityArn": f"{RESERVED}-{number}", "Status": "Active"}
        for number in (1, 2)
    ]
    plan = {
        "TrainingPlanArn": PLAN,
        "TrainingPlanName": "november",
        "Status": "Active",
        "StartTime": (now - timedelta(days=1)).timestamp(),
        "EndTime": (now + timedelta(days=2)).timestamp(),
        "AvailableInstanceCount": 8,
        "TargetResources": ["training-job"],
        "ReservedCapacitySummaries": capacities,
    }
    return Answer.json({**plan, **changes})


def test_a_training_plan_needs_three_kinds_of_resources(account: Front, checks: Checks) -> None:
    account.respond("DescribeTrainingPlan", training_plan())
    checks(*WITH_PLAN)
    resources = asked(account)["sagemaker:CreateTrainingJob"]
    assert resources > {PLAN, f"{RESERVED}-1", f"{RESERVED}-2"}
    assert len(resources) == 4
    plans = [each for each in account.requests if each.operation == "DescribeTrainingPlan"]
    assert len(plans) == 1, "one call for both checks"


@pytest.mark.parametrize("kind", ["training-plan", "reserved-capacity"])
def test_a_caller_without_a_right_to_the_plan(account: Front, checks: Checks, kind: str) -> None:
    account.respond("DescribeTrainingPlan", training_plan())
    account.rules["SimulatePrincipalPolicy"] = simulation(
        {"sagemaker:CreateTrainingJob": "implicitDeny"}, only=f":{kind}/"
    )
    failure = only_failure(checks(*WITH_PLAN), "caller")
    assert f"sagemaker:CreateTrainingJob on arn:aws:sagemaker:{HERE}:{kind}/" in failure.detail
    assert f":{kind}/" in failure.fix


def test_reserved_capacities_that_are_not_known(account: Front, checks: Checks) -> None:
    """A policy may name them, so that a denial of a made-up one is no failure."""
    account.respond("DescribeTrainingPlan", Answer.denied("AccessDeniedException"))
    account.rules["SimulatePrincipalPolicy"] = simulation(
        {"sagemaker:CreateTrainingJob": "implicitDeny"}, only=":reserved-capacity/"
    )
    found = checks(*WITH_PLAN)
    assert found["caller"].result is Result.UNKNOWN
    assert ":reserved-capacity/*" in found["caller"].fix


def test_the_role_may_ask_for_the_registrys_credentials(account: Front, checks: Checks) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"lambda:InvokeFunction": "implicitDeny"})
    found = checks(*PRIVATE, text=SCRIPT)
    assert found["permissions"].result is Result.UNKNOWN, "the function's own policy may allow it"
    assert f"lambda:InvokeFunction on {FUNCTION}" in found["permissions"].detail
    assert "put-role-policy" in found["permissions"].fix


def test_a_function_of_another_account_needs_the_roles_policy(
    account: Front, checks: Checks
) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"lambda:InvokeFunction": "implicitDeny"})
    other = [each.replace(f"{ACCOUNT}:function", "999999999999:function") for each in PRIVATE]
    assert checks(*other, text=SCRIPT)["permissions"].result is Result.FAIL


def test_a_caller_who_may_open_no_shell_is_warned(account: Front, checks: Checks) -> None:
    """The job runs, and somebody else may open the shell."""
    assert checks("cluster.remote_debug=true", text=SCRIPT)["remote debugging"].warning == ""
    account.rules["SimulatePrincipalPolicy"] = simulation({"ssm:StartSession": "implicitDeny"})
    found = checks("cluster.remote_debug=true", text=SCRIPT)
    assert {each.result for each in found.values()} == {Result.PASS}
    assert "ssm:StartSession" in found["remote debugging"].warning
    assert "allow_remote_debugging" in found["remote debugging"].warning
    target = context_keys(account, "ssm:StartSession")["ssm:resourceTag/aws:ssmmessages:target-id"]
    assert re.fullmatch(r"sagemaker-training-job:demo-.*_algo-1", target[0])
    assert "remote debugging" not in checks(text=SCRIPT)


def test_interfaces_are_asked_for_on_every_resource(account: Front, checks: Checks) -> None:
    checks(NETWORK, text=SCRIPT)
    kinds = {
        arn.rpartition(":")[2].partition("/")[0]
        for arn in asked(account)["ec2:CreateNetworkInterface"]
    }
    assert kinds == {"network-interface", "security-group", "subnet"}


def test_a_queue_is_asked_for_on_every_resource(account: Front, checks: Checks) -> None:
    checks("cluster.queue={name: ml, quota_share: vision}")
    found = asked(account)
    assert "sagemaker:CreateTrainingJob" not in found, "AWS Batch creates the job"
    ends = {
        re.sub(r"service-job/.*", "service-job", arn.split(":", 5)[5])
        for arn in found["batch:SubmitServiceJob"]
    }
    assert ends == {"job-queue/ml", "job-queue/ml/quota-share/vision", "service-job"}
    assert len(found["batch:TagResource"]) == 1


def test_conditions_get_the_values_of_every_field(account: Front, checks: Checks) -> None:
    checks(
        "cluster.remote_debug=true",
        "cluster.keep_alive=1h",
        "data.train={fsx: fs-01234567, path: /mount/data, mount: rw}",
        "tags={team: vision}",
        NETWORK,
    )
    given = context_keys(account, "sagemaker:CreateTrainingJob")
    wanted = {
        "aws:RequestTag/team": ["vision"],
        "sagemaker:EnableRemoteDebug": ["true"],
        "sagemaker:KeepAlivePeriod": ["3600"],
        "sagemaker:FileSystemId": ["fs-01234567"],
        "sagemaker:FileSystemType": ["FSxLustre"],
        "sagemaker:FileSystemAccessMode": ["rw"],
        "sagemaker:FileSystemDirectoryPath": ["/mount/data"],
    }
    assert {key: given.get(key) for key in wanted} == wanted
    assert {"team", "cloudtrain:job"} <= set(given["aws:TagKeys"])
    assert "sagemaker:NetworkIsolation" not in given, (
        "AWS may have no value for a field that is not sent"
    )


def test_a_grant_names_all_of_what_the_check_made_up(account: Front, checks: Checks) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation(
        {"batch:SubmitServiceJob": "implicitDeny"}
    )
    failure = checks("cluster.queue=ml")["caller"]
    document = json.loads(failure.fix.partition("permissions: ")[2])
    resources = {statement["Resource"] for statement in document["Statement"]}
    assert f"arn:aws:batch:{HERE}:service-job/*" in resources
