"""Every member of CreateTrainingJob is a field of job.yaml, is derived, can be set by `request`, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from support.jobs import Cli
from support.plans import SCRIPT_JOB, PlanOf, refusal
from support.reference_pages import describe_members

from cloudtrain.console.plans import print_plan
from cloudtrain.errors import SpecError
from cloudtrain.job.request_members import DERIVED, FIELDS, REFUSED
from cloudtrain.job.spec import JobSpec

INPUT = (
    botocore.session.get_session()
    .get_service_model("sagemaker")
    .operation_model("CreateTrainingJob")
    .input_shape
)
CHANNELS = "InputDataConfig"
DATASET = "DataSource.DatasetSource"
TEXTS = (
    *("a", "s3://bucket/key", "4K", "ml.t3.medium"),
    *(
        f"arn:aws:sagemaker:us-west-2:123456789012:{resource}"
        for resource in (
            "hub-content/hub/DataSet/a",
            "hub-content/hub/Model/a",
            "model-package-group/a",
        )
    ),
    "arn:aws:sagemaker:us-west-2:123456789012:model-package/a",
)
"""Values of text members. A new member with another pattern needs one more."""
MLFLOW = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/mine"
TRAINING_PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
NETWORK = "cluster.network={subnets: [subnet-1], security_groups: [sg-1], isolation: true, encrypt_traffic: true}"
JOBS = (
    (
        "cluster.spot=true",
        NETWORK,
        "code.env={A: b}",
        "limits.retries=3",
        "tracking={tensorboard: true}",
    ),
    (
        *(
            "cluster.prefer=[ml.p5.48xlarge]",
            "cluster.instance_type=null",
            "cluster.max_pending=6h",
            "cluster.keep_alive=1h",
        ),
        *(f"tracking.mlflow={MLFLOW}", "cluster.remote_debug=true", "cluster.health_check=true"),
    ),
    (
        *(f"cluster.training_plan={TRAINING_PLAN}", "output={compress: false}", NETWORK),
        *(
            "cluster.image={uri: registry/train, private_registry: {}}",
            "data.a={fsx: fs-01234567, path: /fsx/a}",
        ),
        "data.b={uri: s3://bucket/b, mode: FastFile}",
    ),
)
"""Overrides of jobs that set every field."""


def full_value(shape: Any) -> Any:
    """Return a value that the model accepts, with every member."""
    if shape.type_name == "structure":
        return {name: full_value(member) for name, member in shape.members.items()}
    if shape.type_name == "list":
        return [full_value(shape.member)]
    if shape.type_name == "map":
        return {full_value(shape.key): full_value(shape.value)}
    if shape.type_name == "string":
        pattern, most = shape.metadata.get("pattern", ".*"), shape.metadata.get("max", 10_000)
        candidates = shape.enum or [
            text for text in TEXTS if re.fullmatch(pattern, text) and len(text) <= most
        ]
        return candidates[0]
    return {"integer": 2, "long": 2, "boolean": True}[shape.type_name]


def free_members(shape: Any, above: str = "") -> Any:
    """Return every member that is neither a field, nor derived or refused, with a value."""
    known = {**FIELDS, **DERIVED, **REFUSED}
    found = {}
    for name, member in shape.members.items():
        path = f"{above}{name}"
        if path in known:
            continue
        if not any(each.startswith(f"{path}.") for each in known):
            found[name] = full_value(member)
        elif member.type_name == "structure" and (below := free_members(member, f"{path}.")):
            found[name] = below
    return found


def leaves(value: Any, path: str = "") -> Iterator[str]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in items:
        part = f".{key}" if isinstance(key, str) else ""
        yield f"{path}{part}".removeprefix(".")
        yield from leaves(below, f"{path}{part}")


def member_paths(shape: Any, above: str = "") -> Iterator[str]:
    """Yield the path of every member at any depth, without the places in lists."""
    if shape.type_name == "list":
        yield from member_paths(shape.member, above)
    for name, member in shape.members.items() if shape.type_name == "structure" else ():
        yield f"{above}{name}"
        yield from member_paths(member, f"{above}{name}.")


def test_request_reaches_every_member_without_a_field(plan_of: PlanOf) -> None:
    members = free_members(INPUT)
    channel = free_members(INPUT.members[CHANNELS].member, f"{CHANNELS}.")
    dataset = channel["DataSource"].pop("DatasetSource")
    members[CHANNELS] = [
        {"ChannelName": "train", **channel},
        {"ChannelName": "set", "DataSource": {"DatasetSource": dataset}},
    ]
    spec = {
        "name": "demo",
        "code": {"script": "train.py"},
        "cluster": {"instance_type": "ml.p4d.24xlarge"},
    }
    text = JobSpec(**{**spec, "data": {"train": {"uri": "s3://bucket/train"}}, "request": members})  # type: ignore[arg-type]
    import yaml

    request = plan_of(text=yaml.safe_dump(text.to_document())).request
    assert ParamValidator().validate(request, INPUT).generate_report() == ""
    assert set(leaves(members)) <= set(leaves(request))
    reached = set(leaves(members)) | {*FIELDS, *DERIVED, *REFUSED}
    for path in member_paths(INPUT):
        assert any(
            path == each or path.startswith(f"{each}.") or each.startswith(f"{path}.")
            for each in reached
        ), path


def test_every_member_with_a_field_is_set_by_it(plan_of: PlanOf) -> None:
    rendered = {
        path for overrides in JOBS for path in leaves(plan_of(*overrides, text=SCRIPT_JOB).request)
    }
    assert set(FIELDS) - rendered == set()
    assert rendered.isdisjoint(REFUSED)
    schema = JobSpec.model_json_schema()
    for place in FIELDS.values():
        at: Any = schema
        for part in place.split("."):
            reference = next(
                (each["$ref"] for each in [at, *at.get("anyOf", ())] if "$ref" in each), ""
            )
            at = schema["$defs"][reference.rpartition("/")[2]] if reference else at
            at = at["additionalProperties"] if part == "<name>" else at["properties"][part]


@pytest.mark.parametrize("member", sorted({**FIELDS, **DERIVED, **REFUSED}))
def test_members_that_cloudtrain_sets_are_refused(plan_of: PlanOf, member: str) -> None:
    if member == f"{CHANNELS}.ChannelName":  # it names the channel that the other members belong to
        return
    *above, name = member.split(".")
    value: Any = {name: "x"}
    for part in reversed(above):
        value = {part: [{"ChannelName": "train", **value}] if part == CHANNELS else value}
    with pytest.raises(SpecError) as caught:
        JobSpec(  # type: ignore[call-arg]
            name="demo",
            code={"script": "train.py"},
            cluster={"instance_type": "ml.g5.xlarge"},
            data={"train": "s3://bucket/train"},
            request=value,
        )
    (problem,) = caught.value.problems
    assert problem.path.replace("[0]", "") == f"request.{member}"
    wanted = FIELDS.get(member) or (DERIVED.get(member) or REFUSED[member]).partition(": ")[
        2
    ].removeprefix("use ")
    assert wanted in problem.hint


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            "{ExperimentConfg: {}}",
            "ExperimentConfg: no member of CreateTrainingJob (model of botocore ",
        ),
        ("{ExperimentConfg: {}}", 'did you mean "ExperimentConfig"?'),
        ("{ExperimentConfig: {TrialNam: a}}", "TrialNam: no member of CreateTrainingJob"),
        (
            "{ExperimentConfig: {TrialName: 4}}",
            "ExperimentConfig.TrialName: expected text, got 4; write it in quotes",
        ),
        ("{ExperimentConfig: demo}", "ExperimentConfig: expected a mapping of members, got 'demo'"),
        (
            "{ExperimentConfig: null}",
            "ExperimentConfig: expected a mapping of members, got nothing",
        ),
        (
            "{ExperimentConfig: {TrialName: -a}}",
            "ExperimentConfig.TrialName: '-a' has a form that AWS refuses",
        ),
        (
            "{ExperimentConfig: {TrialName: ''}}",
            "ExperimentConfig.TrialName: AWS allows at least 1 characters, got 0",
        ),
        ("{DebugRuleConfigurations: {}}", "DebugRuleConfigurations: expected a list, got {}"),
        (
            "{DebugHookConfig: {LocalPath: /a}}",
            "DebugHookConfig.S3OutputPath: required field is missing",
        ),
        (
            "{ProfilerConfig: {DisableProfiler: 1}}",
            "ProfilerConfig.DisableProfiler: expected true or false, got 1",
        ),
        (
            "{ProfilerConfig: {ProfilingParameters: []}}",
            "ProfilingParameters: expected a mapping, got []",
        ),
        (
            "{InputDataConfig: [{ChannelName: train, CompressionType: Gzi}]}",
            'CompressionType: expected one of AWS\'s 2 values, got "Gzi"; did you mean "Gzip"?',
        ),
        (
            "{ServerlessJobConfig: {BaseModelArn: a, JobType: FineTuning}}",
            "ServerlessJobConfig: a serverless job has no container and no instances, and this job has both; leave it out",
        ),
        (
            "{ResourceConfig: {InstancePlacementConfig: {EnableMultipleJobs: 1}}}",
            "expected true or false, got 1",
        ),
        (
            "{InputDataConfig: [{ChannelName: x}]}",
            "InputDataConfig[0].ChannelName: there is no channel x in data",
        ),
        (
            "{InputDataConfig: [{ContentType: x}]}",
            "InputDataConfig[0]: ChannelName is missing, which names the channel",
        ),
        (
            "{InputDataConfig: [{ChannelName: code}]}",
            "cloudtrain uses this channel itself; name a channel in data",
        ),
        (
            "{InputDataConfig: [{ChannelName: train, ShuffleConfig: {Seed: true}}]}",
            "InputDataConfig[0].ShuffleConfig.Seed: expected an integer, got true",
        ),
        (
            "{InputDataConfig: [{ChannelName: train, RecordWrapperType: Record}]}",
            "InputDataConfig[0].RecordWrapperType: expected one of AWS's 2 values",
        ),
    ],
)
def test_a_wrong_member_is_refused_with_its_place(
    plan_of: PlanOf, members: str, expected: str
) -> None:
    text = f"{SCRIPT_JOB}data: {{train: 's3://bucket/train'}}\nrequest: {members}\n"
    found = refusal(plan_of, text=text)
    assert expected in found
    assert "job.yaml:5:" in found


def test_all_wrong_members_are_reported_together(cli: Cli, job: Callable[..., Path]) -> None:
    text = (
        "request:\n  RoleArn: arn\n  ExperimentConfig: {TrialName: '-a', Trial: b}\n  StoppingCondition:\n"
        "    MaxRuntimeInSeconds: 60\n  DebugHookConfig: {S3OutputPath: 7}\n  ModelPackageConfig: {}\n"
    )
    done = cli("validate", job(SCRIPT_JOB + text, train_py=""), "--json")
    assert done.code == 2
    assert [(each["line"], each["column"], each["path"]) for each in done.json["problems"]] == [
        (5, 3, "request.RoleArn"),
        (6, 39, "request.ExperimentConfig.Trial"),
        (8, 5, "request.StoppingCondition.MaxRuntimeInSeconds"),
        (9, 35, "request.DebugHookConfig.S3OutputPath"),
        (10, 23, "request.ModelPackageConfig.ModelPackageGroupArn"),
    ]


def test_the_plan_shows_what_request_sets(
    plan_of: PlanOf, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(
        "request={ExperimentConfig: {ExperimentName: gpt}, ProfilerConfig: {DisableProfiler: false}}"
    )
    assert plan.request["ProfilerConfig"] == {"DisableProfiler": False}
    assert plan.identity != plan_of().identity
    print_plan(plan)
    shown = capsys.readouterr().out
    assert '\nrequest       ExperimentConfig.ExperimentName = "gpt"\n' in shown
    assert "\nrequest       ProfilerConfig.DisableProfiler = false\n" in shown


def test_the_table_of_members_is_complete() -> None:
    table = dict(describe_members())
    assert (
        table["ExperimentConfig"] == table["ResourceConfig.InstancePlacementConfig"] == "`request`"
    )
    assert table["VpcConfig.Subnets"] == "`cluster.network.subnets`"
    assert {path.partition(".")[0] for path in table} == set(INPUT.members)
    assert {*FIELDS, *DERIVED, *REFUSED} <= set(table)
