"""The policies of infra/ allow all recorded AWS calls, and nothing else without a reason."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.applied_policies import (
    IDENTITY,
    LOOK,
    SUBMIT,
    AppliedPolicies,
)
from support.aws_calls import (
    CLIENT,
    CONTAINER,
    Call,
    calls_seen,
    read_raw,
    read_record,
    unknown_calls,
    write_record,
)
from support.iam_policy import (
    Decision,
    Request,
    as_list,
    decide,
)
from support.permissions import PAGE, with_tables
from support.policy_comparison import REASONS, Comparison, compare, plan_requests
from support.required_actions import UnmappedError, context_of, requests_of
from support.terraform import ROOTS

READING = {
    "check",
    "status",
    "logs",
    "list",
    "explain",
    "follow",
    "prices",
    "checkpoints",
    "download",
}
"""Commands that change nothing. The policy `look` must be sufficient for them."""


@pytest.fixture(scope="module")
def stored() -> AppliedPolicies:
    return AppliedPolicies.read()


@pytest.fixture(scope="module")
def requests(stored: AppliedPolicies) -> list[dict[str, Any]]:
    return [dict(each) for each in plan_requests(stored)]


@pytest.fixture(scope="module")
def comparison(stored: AppliedPolicies, requests: list[dict[str, Any]]) -> Comparison:
    return compare(stored, requests)


@pytest.mark.promise
def test_every_recorded_call_is_allowed(comparison: Comparison) -> None:
    assert [
        f"{use.call}: {use.request.action} on {use.request.resource}" for use in comparison.denied
    ] == []


def test_every_unused_permission_has_a_reason(comparison: Comparison) -> None:
    assert [f"{policy}: {grant}" for policy, grant in comparison.unexplained()] == []


def test_every_reason_is_needed(comparison: Comparison) -> None:
    unused = comparison.unused
    assert [reason for reason in REASONS if not any(reason.covers(*each) for each in unused)] == []
    needed = [each for each in comparison.used if any(reason.covers(*each) for reason in REASONS)]
    assert needed == [], "these grants have a reason, but a call needs them"


def test_the_look_policy_allows_read_only_commands(
    stored: AppliedPolicies, requests: list[dict[str, Any]], comparison: Comparison
) -> None:
    denied = [
        f"{use.call}: {use.request.action}"
        for use in comparison.uses
        if use.call.who == CLIENT
        and READING & set(use.call.by)
        and decide([stored.policies[LOOK]], use.request) != Decision.ALLOWED
    ]
    assert denied == []


def test_the_record_holds_both_sides_and_every_verb() -> None:
    record = read_record()
    verbs = {verb for call in record.values() if call.who == CLIENT for verb in call.by}
    parts = {part for call in record.values() if call.who == CONTAINER for part in call.by}
    assert verbs >= {
        "submit",
        "resume",
        "check",
        "status",
        "logs",
        "list",
        "stop",
        "explain",
        "prices",
        "checkpoints",
        "download",
    }
    assert parts >= {"checkpoints", "hang"}
    assert "other" not in verbs | parts


def test_the_page_is_up_to_date(stored: AppliedPolicies, comparison: Comparison) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, stored, comparison) == text, (
        "PYTHONPATH=tests python -m support.permissions --write"
    )


MULTIPLE = {"sagemaker:InstanceTypes", "sagemaker:VpcSubnets", "sagemaker:VpcSecurityGroupIds"}
"""Condition keys that hold lists."""


@pytest.fixture(scope="module")
def simulated(stored: AppliedPolicies) -> Callable[[list[tuple[str, Request]]], list[str]]:
    """Return a function that evaluates requests with iam-simulate.

    iam-simulate contains AWS's reference. It rejects actions, resources and condition keys that do not exist, and
    combinations that AWS does not support.
    """
    folder = os.environ.get("CLOUDTRAIN_IAM_SIMULATE", "")
    if not folder or shutil.which("node") is None:
        pytest.skip(
            "CLOUDTRAIN_IAM_SIMULATE names no folder with @cloud-copilot/iam-simulate (see infra/README.md)"
        )

    def ask(cases: list[tuple[str, Request]]) -> list[str]:
        entries = [
            {
                "policies": [stored.policies[name]],
                "action": asked.action,
                "resource": asked.resource,
                # KMS also evaluates the key's policy, which delegates the decision to the account's policies.
                "own": stored.policies["key"] if asked.action.startswith("kms:") else None,
                "context": {
                    key: list(each) if key in MULTIPLE else each[0]
                    for key, each in asked.context.items()
                },
            }
            for name, asked in cases
        ]
        done = subprocess.run(
            ["node", str(Path(__file__).with_name("simulate.mjs")), folder],
            input=json.dumps(entries),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        answers: list[str] = json.loads(done.stdout)
        return answers

    return ask


def test_another_evaluator_agrees(
    stored: AppliedPolicies,
    comparison: Comparison,
    simulated: Callable[[list[tuple[str, Request]]], list[str]],
) -> None:
    asked = {repr(use.request): use.request for use in comparison.uses}.values()
    cases = [(name, request) for request in asked for name in IDENTITY]
    ours = [str(decide([stored.policies[name]], request)) for name, request in cases]
    theirs = simulated(cases)
    differing = [
        f"{name}: {request}: {one} here, {other} there"
        for (name, request), one, other in zip(cases, ours, theirs, strict=True)
        if one != other
    ]
    assert differing == []
    assert {"allowed", "implicitDeny"} <= set(theirs)


def test_every_allowed_action_exists_in_aws(
    stored: AppliedPolicies, simulated: Callable[[list[tuple[str, Request]]], list[str]]
) -> None:
    """Covers also actions that no recorded call needs: network interfaces, images, keys of volumes."""
    cases = [
        (name, Request(action, filled(resource), context))
        for name in IDENTITY
        for statement in stored.policies[name]["Statement"]
        if statement["Effect"] == "Allow"
        for context in [wanted_by(statement)]
        for action in as_list(statement["Action"])
        for resource in as_list(statement["Resource"])
    ]
    answers = simulated(cases)
    wrong = [
        f"{name}: {asked}: {answer}" for (name, asked), answer in zip(cases, answers, strict=True)
    ]
    assert [each for each in wrong if not each.endswith(": allowed")] == []


def filled(text: str) -> str:
    """Return a resource or a value that matches a pattern."""
    text = (
        text.replace("${aws:username}", "ada")
        .replace(":*", ":log-stream:x")
        .replace("log-stream:log-stream", "log-stream")
    )
    return text if text == "*" else text.replace("*", "x")


def wanted_by(statement: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return a context that meets a statement's conditions."""
    context = {"aws:username": ("ada",)}
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            if operator != "Null":
                context[key] = (filled(str(as_list(values)[0])),)
            elif key not in MULTIPLE:
                context[key] = ("first",)
    return context


@pytest.mark.promise  # as all tests of what Terraform applies: it takes two minutes, once
@pytest.mark.aws
@pytest.mark.timeout(1800)
def test_stored_policies_equal_those_that_terraform_renders(
    applied: dict[str, Any], tmp_path: Path, stored: AppliedPolicies
) -> None:
    rendered = AppliedPolicies.from_terraform(applied["module"])
    path = tmp_path / "applied.json"
    path.write_text(json.dumps(applied))
    assert vars(rendered) == {"outputs": stored.outputs, "policies": stored.policies}, (
        f"cp {path} /tmp && PYTHONPATH=tests python -m support.permissions --policies /tmp/applied.json"
    )


@pytest.mark.parametrize(
    "subnets", [("subnet-1def", "subnet-33d1"), ("subnet-ba18", "subnet-7448")]
)
def test_stored_policies_do_not_depend_on_random_names(subnets: tuple[str, str]) -> None:
    """The provider sorts the resources of a statement by their names, but not the values of a condition."""
    statement = {
        "Resource": sorted(subnets, reverse=True),
        "Condition": {"StringEquals": {"Subnets": list(subnets)}},
    }
    policy = {
        "type": "aws_iam_policy",
        "name": SUBMIT,
        "values": {"policy": json.dumps({"Statement": [statement]})},
    }
    outputs = {
        "bucket": "train-c30f",
        "kms_key": "key/82d3",
        "subnets": list(subnets),
        "security_groups": [],
    }
    rendered = AppliedPolicies.from_terraform({"outputs": outputs, "resources": [policy]})
    fixed = ["subnet-00000000000000000", "subnet-00000000000000001"]
    assert rendered.outputs["subnets"] == fixed
    assert rendered.policies[SUBMIT]["Statement"] == [
        {"Resource": fixed, "Condition": {"StringEquals": {"Subnets": fixed}}}
    ]


@pytest.mark.promise
@pytest.mark.aws
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("root", ROOTS)
def test_outputs_of_every_root_allow_a_first_job(applied: dict[str, Any], root: str) -> None:
    """A job's request is within the limits of the policy of each module."""
    own = AppliedPolicies.from_terraform(applied[root])
    create = Call(CLIENT, "sagemaker", "CreateTrainingJob", "training-job/{run}", ("Tags",))
    requests = [dict(each) for each in plan_requests(own, root)]
    assert requests
    for request in requests_of(create, own, requests):
        assert decide([own.policies[SUBMIT]], request) == Decision.ALLOWED, request


def without(stored: AppliedPolicies, policy: str, sid: str) -> AppliedPolicies:
    document = stored.policies[policy]
    statements = [each for each in document["Statement"] if each["Sid"] != sid]
    assert len(statements) < len(document["Statement"])
    return dataclasses.replace(
        stored, policies={**stored.policies, policy: {**document, "Statement": statements}}
    )


def statements() -> list[tuple[str, str]]:
    """Return every statement that a call needs."""
    stored = AppliedPolicies.read()
    with_reason = {(reason.policy, reason.sid) for reason in REASONS if not reason.actions}
    return [
        (policy, each["Sid"])
        for policy in IDENTITY
        for each in stored.policies[policy]["Statement"]
        if each["Effect"] == "Allow" and (policy, each["Sid"]) not in with_reason
    ]


def test_removing_any_statement_denies_a_recorded_call(
    stored: AppliedPolicies, requests: list[dict[str, Any]], comparison: Comparison
) -> None:
    """Submitters have two policies. Some of their statements allow the same actions."""
    by_both = {
        grant
        for use in comparison.uses
        if len({policy for policy, _ in use.grants}) > 1
        for grant in use.grants
    }
    missed = 0
    for policy, sid in statements():
        is_needed = any(
            {(name, grant.sid) for name, grant in use.grants} == {(policy, sid)}
            for use in comparison.uses
        )
        denied = compare(without(stored, policy, sid), requests).denied
        assert bool(denied) == is_needed, (policy, sid)
        assert is_needed or any((name, grant.sid) == (policy, sid) for name, grant in by_both), (
            policy,
            sid,
        )
        missed += is_needed
    assert missed > 15


def test_a_denial_of_code_reaches_the_container(stored: AppliedPolicies) -> None:
    writes = Call(CONTAINER, "s3", "PutObject", "{bucket}/{prefix}/code/*", by=("checkpoints",))
    (use, *_) = compare(stored, [], {writes.key: writes}).uses
    assert use.decision == Decision.EXPLICIT


def test_a_job_changes_no_upload_of_the_client(stored: AppliedPolicies) -> None:
    """Except the data of a run: a job may also change the checkpoints that another one begins with."""
    writing = ("PutObject", "UploadPart")
    uploads = [
        dataclasses.replace(call, who=CONTAINER)
        for call in read_record()
        if call.who == CLIENT and call.service == "s3" and call.operation in writing
    ]
    uses = compare(stored, [], {call: call for call in uploads}).uses
    assert len(uploads) > 5
    writes = [use for use in uses if use.request.action == "s3:PutObject"]
    assert {use.call.resource for use in writes if use.decision is not Decision.EXPLICIT} == {
        "{bucket}/{prefix}/{run}/data/*"
    }


def test_a_new_operation_must_be_mapped(stored: AppliedPolicies) -> None:
    with pytest.raises(UnmappedError):
        requests_of(Call(CLIENT, "sagemaker", "DeleteApp", "*"), stored, [])


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({}, True),
        ({"VpcConfig": {"Subnets": ["subnet-other"], "SecurityGroupIds": ["sg-other"]}}, False),
        ({"VpcConfig": {}}, False),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 28 * 86400}}, False),
        ({"OutputDataConfig": {"S3OutputPath": "s3://x/y"}}, False),
        ({"ResourceConfig": {"InstanceType": "ml.p6-b200.48xlarge", "InstanceCount": 1}}, False),
    ],
)
def test_a_job_beyond_the_limits_is_denied(
    stored: AppliedPolicies,
    requests: list[dict[str, Any]],
    change: dict[str, Any],
    is_allowed: bool,
) -> None:
    job = "arn:aws:sagemaker:us-west-2:123456789012:training-job/x"
    for planned_request in requests:
        asked = Request(
            "sagemaker:CreateTrainingJob", job, context_of({**planned_request, **change})
        )
        assert (decide([stored.policies[SUBMIT]], asked) == Decision.ALLOWED) is is_allowed


def raw(**fields: Any) -> dict[str, Any]:
    line = {
        "service": "s3",
        "operation": "PutObject",
        "parameters": {
            "": ["Bucket", "Key"],
            "Bucket": "cloudtrain-test",
            "Key": "cloudtrain/queues/q",
        },
        "stack": ["cloudtrain.backends.sagemaker.batch_queue:Queues.submit"],
        "program": ["cloudtrain", "submit"],
    }
    return {**line, **fields}


RUN = "first-261121-120000-0a1b2c"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "client (submit): s3 PutObject on {bucket}/{prefix}/queues/*"),
        (
            {
                "stack": [
                    "cloudtrain_runtime.s3.objects:put",
                    "cloudtrain_runtime.checkpoint.storage:S3Storage.write",
                ]
            },
            "container (checkpoints): s3 PutObject on {bucket}/{prefix}/queues/*",
        ),
        (
            {
                "stack": ["cloudtrain_runtime.s3.objects:put"],
                "parameters": {
                    "": [],
                    "Bucket": "any",
                    "Key": f"p/{RUN}/checkpoints/step-00000010/model",
                },
            },
            "container (checkpoints): s3 PutObject on {bucket}/{prefix}/{run}/checkpoints/*",
        ),
        (
            {
                "parameters": {"": ["Tags"], "Bucket": "other", "Key": "images/1"},
                "program": ["pytest"],
            },
            "client (submit): s3 PutObject on {data}/* with Tags",
        ),
        (
            {"program": ["cloudtrain", "--profile", "mine", "check", "job.yaml"]},
            "client (check): s3 PutObject on {bucket}/{prefix}/queues/*",
        ),
        (
            {"stack": ["cloudtrain.backends.sandbox.s3_sync:S3FolderSync.push"]},
            "service (inputs and outputs): s3 PutObject on {bucket}/{prefix}/queues/*",
        ),
    ],
)
def test_recorded_lines_are_parsed(fields: dict[str, Any], expected: str) -> None:
    (call,) = read_raw(raw(**fields))
    assert str(call) == expected


def test_the_sandboxs_own_calls_are_not_recorded() -> None:
    made = {
        "operation": "CreateBucket",
        "parameters": {"": ["Bucket"], "Bucket": "cloudtrain-sandbox"},
    }
    assert list(read_raw(raw(stack=["cloudtrain.backends.sandbox.server:_start"], **made))) == []


def test_a_record_is_written_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text(
        f"{json.dumps(raw())}\n{json.dumps(raw(program=['cloudtrain', 'resume']))}\n"
    )
    calls = calls_seen(tmp_path)
    assert [call.by for call in calls.values()] == [("resume", "submit")]
    write_record(calls.values(), tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == calls


def test_new_calls_are_reported(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text(
        f"{json.dumps(raw())}\n{json.dumps(raw(operation='PutObjectAcl'))}\n"
    )
    assert [call.operation for call in unknown_calls(tmp_path)] == ["PutObjectAcl"]
    assert unknown_calls(tmp_path / "nothing") == []


def test_only_calls_of_the_product_are_recorded(aws: dict[str, str], cli: Any) -> None:
    """Checks the recording in this process, and in a process that the command line starts."""
    import boto3

    folder = Path(os.environ["CLOUDTRAIN_TEST_RECORD"])
    boto3.client("ec2").describe_account_attributes()
    assert cli("status", "missing-261121-120000-0a1b2c", "--json").code == 2
    calls = [call for call in calls_seen(folder).values() if call.who == CLIENT]
    seen = {(call.service, call.operation): call for call in calls}
    assert "status" in seen["sagemaker", "DescribeTrainingJob"].by
    assert ("ec2", "DescribeAccountAttributes") not in seen
