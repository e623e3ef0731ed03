"""The policies allow what cloudtrain calls, and nothing else: the record against the policies, both ways."""

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
from support.permissions import (
    EXECUTION,
    LOOK,
    PAGE,
    REASONS,
    SUBMIT,
    Kept,
    Proof,
    UnmappedError,
    context_of,
    planned,
    prove,
    requests_of,
    with_tables,
)
from support.terraform import ROOTS

READING = {"check", "status", "logs", "list", "explain", "follow", "prices", "checkpoints"}
"""Verbs that change nothing: who has the policy `look` alone must be able to use them."""


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept.read()


@pytest.fixture(scope="module")
def requests(kept: Kept) -> list[dict[str, Any]]:
    return [dict(each) for each in planned(kept)]


@pytest.fixture(scope="module")
def proof(kept: Kept, requests: list[dict[str, Any]]) -> Proof:
    return prove(kept, requests)


def test_every_recorded_call_is_allowed(proof: Proof) -> None:
    assert [f"{use.call}: {use.request.action} on {use.request.resource}" for use in proof.denied] == []


def test_every_unused_permission_has_a_reason(proof: Proof) -> None:
    assert [f"{policy}: {grant}" for policy, grant in proof.unexplained()] == []


def test_every_reason_is_needed(proof: Proof) -> None:
    unused = proof.unused
    assert [reason for reason in REASONS if not any(reason.covers(*each) for each in unused)] == []
    needed = [each for each in proof.used if any(reason.covers(*each) for reason in REASONS)]
    assert needed == [], "a reason for what a call needs"


def test_the_look_policy_allows_read_only_commands(kept: Kept, requests: list[dict[str, Any]], proof: Proof) -> None:
    denied = [
        f"{use.call}: {use.request.action}"
        for use in proof.uses
        if use.call.who == CLIENT
        and READING & set(use.call.by)
        and decide([kept.policies[LOOK]], use.request) != Decision.ALLOWED
    ]
    assert denied == []


def test_the_record_holds_both_sides_and_every_verb() -> None:
    record = read_record()
    verbs = {verb for call in record.values() if call.who == CLIENT for verb in call.by}
    parts = {part for call in record.values() if call.who == CONTAINER for part in call.by}
    assert verbs >= {"submit", "resume", "check", "status", "logs", "list", "stop", "explain", "prices", "checkpoints"}
    assert parts >= {"checkpoints", "hang"}
    assert "other" not in verbs | parts


def test_the_page_is_up_to_date(kept: Kept, proof: Proof) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, kept, proof) == text, "PYTHONPATH=tests python -m support.permissions --write"


# ---------------------------------------------------------------- what another evaluator says

MULTIPLE = {"sagemaker:InstanceTypes", "sagemaker:VpcSubnets", "sagemaker:VpcSecurityGroupIds"}
"""Condition keys that hold lists."""


@pytest.fixture(scope="module")
def simulated(kept: Kept) -> Callable[[list[tuple[str, Request]]], list[str]]:
    """Return what iam-simulate answers, which knows AWS's reference, too.

    It refuses actions, resources and condition keys that there are not, or that do not go together.
    """
    folder = os.environ.get("CLOUDTRAIN_IAM_SIMULATE", "")
    if not folder or shutil.which("node") is None:
        pytest.skip("CLOUDTRAIN_IAM_SIMULATE names no folder with @cloud-copilot/iam-simulate (see infra/README.md)")

    def ask(cases: list[tuple[str, Request]]) -> list[str]:
        entries = [
            {
                "policies": [kept.policies[name]],
                "action": asked.action,
                "resource": asked.resource,
                # KMS asks a key's own policy, too, which hands the decision to the account's.
                "own": kept.policies["key"] if asked.action.startswith("kms:") else None,
                "context": {key: list(each) if key in MULTIPLE else each[0] for key, each in asked.context.items()},
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
    kept: Kept, proof: Proof, simulated: Callable[[list[tuple[str, Request]]], list[str]]
) -> None:
    asked = {repr(use.request): use.request for use in proof.uses}.values()
    cases = [(name, request) for request in asked for name in (EXECUTION, SUBMIT, LOOK)]
    ours = [str(decide([kept.policies[name]], request)) for name, request in cases]
    theirs = simulated(cases)
    differing = [
        f"{name}: {request}: {one} here, {other} there"
        for (name, request), one, other in zip(cases, ours, theirs, strict=True)
        if one != other
    ]
    assert differing == []
    assert {"allowed", "implicitDeny"} <= set(theirs)


def test_every_allowed_action_exists_in_aws(
    kept: Kept, simulated: Callable[[list[tuple[str, Request]]], list[str]]
) -> None:
    """Also what no call of the record asks for: network interfaces, images, keys of volumes."""
    cases = [
        (name, Request(action, filled(resource), context))
        for name in (EXECUTION, SUBMIT, LOOK)
        for statement in kept.policies[name]["Statement"]
        if statement["Effect"] == "Allow"
        for context in [wanted_by(statement)]
        for action in as_list(statement["Action"])
        for resource in as_list(statement["Resource"])
    ]
    answers = simulated(cases)
    wrong = [f"{name}: {asked}: {answer}" for (name, asked), answer in zip(cases, answers, strict=True)]
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
    """Return a context that a statement's conditions are true of."""
    context = {"aws:username": ("ada",)}
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            if operator != "Null":
                context[key] = (filled(str(as_list(values)[0])),)
            elif key not in MULTIPLE:
                context[key] = ("first",)
    return context


# ---------------------------------------------------------------- what is kept is what Terraform renders


@pytest.mark.aws
@pytest.mark.timeout(1800)
def test_kept_policies_are_those_that_terraform_renders(applied: dict[str, Any], tmp_path: Path, kept: Kept) -> None:
    rendered = Kept.of(applied["module"])
    path = tmp_path / "applied.json"
    path.write_text(json.dumps(applied))
    assert vars(rendered) == {"outputs": kept.outputs, "policies": kept.policies}, (
        f"cp {path} /tmp && PYTHONPATH=tests python -m support.permissions --policies /tmp/applied.json"
    )


@pytest.mark.parametrize("subnets", [("subnet-1def", "subnet-33d1"), ("subnet-ba18", "subnet-7448")])
def test_stored_policies_do_not_depend_on_random_names(subnets: tuple[str, str]) -> None:
    """The provider sorts the resources of a statement by their names, and leaves the values of a condition."""
    statement = {"Resource": sorted(subnets, reverse=True), "Condition": {"StringEquals": {"Subnets": list(subnets)}}}
    policy = {"type": "aws_iam_policy", "name": SUBMIT, "values": {"policy": json.dumps({"Statement": [statement]})}}
    outputs = {"bucket": "train-c30f", "kms_key": "key/82d3", "subnets": list(subnets), "security_groups": []}
    drawn = Kept.of({"outputs": outputs, "resources": [policy]})
    fixed = ["subnet-00000000000000000", "subnet-00000000000000001"]
    assert drawn.outputs["subnets"] == fixed
    assert drawn.policies[SUBMIT]["Statement"] == [
        {"Resource": fixed, "Condition": {"StringEquals": {"Subnets": fixed}}}
    ]


@pytest.mark.aws
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("root", ROOTS)
def test_outputs_of_every_root_allow_a_first_job(applied: dict[str, Any], root: str) -> None:
    """A job's request is within the limits of the policy of each module."""
    own = Kept.of(applied[root])
    create = Call(CLIENT, "sagemaker", "CreateTrainingJob", "training-job/{run}", ("Tags",))
    requests = [dict(each) for each in planned(own, root)]
    assert requests
    for request in requests_of(create, own, requests):
        assert decide([own.policies[SUBMIT]], request) == Decision.ALLOWED, request


# ---------------------------------------------------------------- the proof can fail


def without(kept: Kept, policy: str, sid: str) -> Kept:
    document = kept.policies[policy]
    statements = [each for each in document["Statement"] if each["Sid"] != sid]
    assert len(statements) < len(document["Statement"])
    return dataclasses.replace(kept, policies={**kept.policies, policy: {**document, "Statement": statements}})


def statements() -> list[tuple[str, str]]:
    """Return every statement that some call needs."""
    kept = Kept.read()
    silent = {(reason.policy, reason.sid) for reason in REASONS if not reason.actions}
    return [
        (policy, each["Sid"])
        for policy in (EXECUTION, SUBMIT, LOOK)
        for each in kept.policies[policy]["Statement"]
        if each["Effect"] == "Allow" and (policy, each["Sid"]) not in silent
    ]


def test_removing_any_statement_denies_a_recorded_call(
    kept: Kept, requests: list[dict[str, Any]], proof: Proof
) -> None:
    """Submitters have two policies, some of whose statements allow the same."""
    by_both = {grant for use in proof.uses if len({policy for policy, _ in use.grants}) > 1 for grant in use.grants}
    missed = 0
    for policy, sid in statements():
        is_needed = any({(name, grant.sid) for name, grant in use.grants} == {(policy, sid)} for use in proof.uses)
        denied = prove(without(kept, policy, sid), requests).denied
        assert bool(denied) == is_needed, (policy, sid)
        assert is_needed or any((name, grant.sid) == (policy, sid) for name, grant in by_both), (policy, sid)
        missed += is_needed
    assert missed > 15


def test_a_denial_of_code_reaches_the_container(kept: Kept) -> None:
    writes = Call(CONTAINER, "s3", "PutObject", "{bucket}/{prefix}/code/*", by=("checkpoints",))
    (use, *_) = prove(kept, [], {writes.key: writes}).uses
    assert use.decision == Decision.EXPLICIT


def test_a_new_operation_must_be_mapped(kept: Kept) -> None:
    with pytest.raises(UnmappedError):
        requests_of(Call(CLIENT, "sagemaker", "DeleteModel", "*"), kept, [])


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
    kept: Kept, requests: list[dict[str, Any]], change: dict[str, Any], is_allowed: bool
) -> None:
    job = "arn:aws:sagemaker:us-west-2:123456789012:training-job/x"
    for planned_request in requests:
        asked = Request("sagemaker:CreateTrainingJob", job, context_of({**planned_request, **change}))
        assert (decide([kept.policies[SUBMIT]], asked) == Decision.ALLOWED) is is_allowed


# ---------------------------------------------------------------- the record


def raw(**fields: Any) -> dict[str, Any]:
    line = {
        "service": "s3",
        "operation": "PutObject",
        "parameters": {"": ["Bucket", "Key"], "Bucket": "cloudtrain-test", "Key": "cloudtrain/queues/q"},
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
            {"stack": ["cloudtrain_runtime.s3.objects:put", "cloudtrain_runtime.checkpoint.storage:S3Storage.write"]},
            "container (checkpoints): s3 PutObject on {bucket}/{prefix}/queues/*",
        ),
        (
            {
                "stack": ["cloudtrain_runtime.s3.objects:put"],
                "parameters": {"": [], "Bucket": "any", "Key": f"p/{RUN}/checkpoints/step-00000010/model"},
            },
            "container (checkpoints): s3 PutObject on {bucket}/{prefix}/{run}/checkpoints/*",
        ),
        (
            {"parameters": {"": ["Tags"], "Bucket": "other", "Key": "images/1"}, "program": ["pytest"]},
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
    made = {"operation": "CreateBucket", "parameters": {"": ["Bucket"], "Bucket": "cloudtrain-sandbox"}}
    assert list(read_raw(raw(stack=["cloudtrain.backends.sandbox.server:_start"], **made))) == []


def test_a_record_is_written_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text(f"{json.dumps(raw())}\n{json.dumps(raw(program=['cloudtrain', 'resume']))}\n")
    calls = calls_seen(tmp_path)
    assert [call.by for call in calls.values()] == [("resume", "submit")]
    write_record(calls.values(), tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == calls


def test_new_calls_are_reported(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text(f"{json.dumps(raw())}\n{json.dumps(raw(operation='PutObjectAcl'))}\n")
    assert [call.operation for call in unknown_calls(tmp_path)] == ["PutObjectAcl"]
    assert unknown_calls(tmp_path / "nothing") == []


def test_only_calls_of_the_product_are_recorded(aws: dict[str, str], cli: Any) -> None:
    """The recorder itself, in a process that the command line starts, and in this one."""
    import boto3

    folder = Path(os.environ["CLOUDTRAIN_TEST_RECORD"])
    boto3.client("ec2").describe_account_attributes()
    assert cli("status", "missing-261121-120000-0a1b2c", "--json").code == 2
    seen = {(call.service, call.operation): call for call in calls_seen(folder).values()}
    assert "status" in seen["sagemaker", "DescribeTrainingJob"].by
    assert ("ec2", "DescribeAccountAttributes") not in seen
