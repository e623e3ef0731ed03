"""The module and both examples are applied over HTTP and destroyed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.terraform import ROOTS, of_type, one_of_type

from cloudtrain.settings.settings import Settings

pytestmark = [
    pytest.mark.promise,
    pytest.mark.aws,
    pytest.mark.timeout(1800),  # the first test applies all roots
]

# Other checks are unknown, because moto lacks their operations (quotas, simulated policies).
PASSED = {"identity", "role", "trust", "bucket", "subnets", "security groups", "way to s3"}


@pytest.mark.parametrize("root", ROOTS)
def test_apply_creates_and_destroy_removes_everything(
    applied: dict[str, Any], root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = applied[root]["resources"]
    with capsys.disabled():
        print(f"\n{root}: {len(resources)} resources created and destroyed")
    assert len(resources) == {"module": 66, "minimal": 47, "existing-vpc": 33}[root]
    assert applied[root]["left"] == []


def test_destroy_restores_the_account(applied: dict[str, Any]) -> None:
    account = applied["account"]
    assert account["after"] == account["before"]
    assert account["before"]["vpcs"]


@pytest.mark.parametrize("root", ROOTS)
def test_outputs_are_the_settings(applied: dict[str, Any], root: str) -> None:
    outputs = {name: value for name, value in applied[root]["outputs"].items() if name != "lustre"}
    assert set(outputs) == {field.name for field in dataclasses.fields(Settings)} - {
        "sources",
        "beside_job",
        "is_trusted",
        "report",
        "slurm",
    }
    settings = Settings(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in outputs.items()
        }
    )
    settings.require()
    assert settings.account == "123456789012"
    assert settings.subnets
    assert settings.security_groups


@pytest.mark.parametrize("root", ROOTS)
def test_outputs_are_stored_as_a_profile(applied: dict[str, Any], root: str) -> None:
    configured, outputs = applied[root]["configured"], dict(applied[root]["outputs"])
    outputs.pop("lustre", None)
    assert configured["profile"] == root
    assert configured["settings"] == outputs
    assert {check["name"]: check["result"] for check in configured["checks"]} == dict.fromkeys(
        ("identity", "role", "trust", "bucket", "subnets", "security groups"), "pass"
    )
    for shown in applied[root]["shown"]["settings"]:
        if shown["name"] == "report":  # of this machine, not of the account
            continue
        # The tests set AWS_REGION, because Terraform needs a region.
        expected = ("AWS_REGION", None) if shown["name"] == "region" else (configured["file"], root)
        assert (shown["source"], shown["profile"]) == expected


@pytest.mark.parametrize("root", ROOTS)
def test_a_first_plan_uses_the_applied_resources(applied: dict[str, Any], root: str) -> None:
    request, outputs = applied[root]["planned"]["request"], applied[root]["outputs"]
    assert request["RoleArn"] == outputs["role"]
    assert request["OutputDataConfig"] == {
        "S3OutputPath": f"s3://{outputs['bucket']}/{outputs['prefix']}",
        "KmsKeyId": outputs["kms_key"],
        **{
            name: value
            for name, value in request["OutputDataConfig"].items()
            if name == "CompressionType"
        },
    }
    assert request["VpcConfig"] == {
        "Subnets": outputs["subnets"],
        "SecurityGroupIds": outputs["security_groups"],
    }


@pytest.mark.parametrize("root", ROOTS)
def test_cloudtrain_checks_the_account_and_finds_it_ready(
    applied: dict[str, Any], root: str
) -> None:
    checks = {check["name"]: check for check in applied[root]["checks"]}
    assert {name: checks[name]["result"] for name in PASSED} == dict.fromkeys(PASSED, "pass")
    assert [check for check in checks.values() if check["result"] == "fail"] == []


def test_the_name_of_the_bucket_cannot_be_guessed(applied: dict[str, Any]) -> None:
    names = [applied[root]["outputs"]["bucket"] for root in ROOTS]
    suffixes = {name.rpartition("-")[2] for name in names}
    assert len(suffixes) == len(names)
    assert all(len(suffix) == 16 and int(suffix, 16) for suffix in suffixes)


def test_budget_notifies_people_and_the_topic(applied: dict[str, Any]) -> None:
    resources = applied["module"]["resources"]
    budget = one_of_type(resources, "aws_budgets_budget")
    topic = one_of_type(resources, "aws_sns_topic")["arn"]
    thresholds = {(each["notification_type"], each["threshold"]) for each in budget["notification"]}
    assert thresholds == {("ACTUAL", 50), ("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100)}
    for each in budget["notification"]:
        assert set(each["subscriber_email_addresses"]) == {"ada@example.com", "bob@example.com"}
        assert each["subscriber_sns_topic_arns"] == [topic]
    assert {each["endpoint"] for each in of_type(resources, "aws_sns_topic_subscription")} == {
        "ada@example.com",
        "bob@example.com",
    }


def test_state_machine_waits_checks_and_notifies(applied: dict[str, Any]) -> None:
    import json

    machine = one_of_type(applied["existing-vpc"]["resources"], "aws_sfn_state_machine")
    definition = json.loads(machine["definition"])
    states = definition["States"]
    assert states["Wait"]["Seconds"] == 48 * 3600
    nexts = [state["Next"] for state in states.values() if "Next" in state]
    choice = states["IsRunning"]
    nexts += [choice["Default"], *(each["Next"] for each in choice["Choices"])]
    assert set(nexts) | {definition["StartAt"]} == set(states)
