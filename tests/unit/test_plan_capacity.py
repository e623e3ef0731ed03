"""Plans with training plans, preferred types of different sizes, and rules of AWS about capacity and regions."""

from __future__ import annotations

import re

import pytest
from support.plans import SETTINGS, PlanOf, local, refusal

from cloudtrain.backends.sagemaker.listing import uses_training_plan
from cloudtrain.catalog import service_limits
from cloudtrain.console.plans import print_plan

PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
ELSEWHERE = PLAN.replace("us-west-2", "eu-west-1")


def test_a_training_plan_is_paid_in_advance(
    plan_of: PlanOf, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(f"cluster.training_plan={PLAN}", "limits.cost=1 USD")
    assert plan.request["ResourceConfig"]["TrainingPlanArn"] == PLAN
    assert (plan.cost.usd_per_hour, plan.cost.max_usd, plan.cost.price_as_of) == (0, 0, None)
    assert plan.max_runtime_seconds == 86400, (
        "a limit of the cost does not shorten what costs nothing"
    )
    assert any(
        decision.startswith("cost: the instances of a training plan") for decision in plan.decisions
    )
    print_plan(plan)
    assert re.search(r"\ncost +paid in advance by the training plan\n", capsys.readouterr().out)


def test_only_types_without_a_training_plan_have_a_price(plan_of: PlanOf) -> None:
    entry = f"{{instance_type: ml.p5.48xlarge, training_plan: '{PLAN}'}}"
    plan = plan_of(f"cluster={{prefer: [{entry}, ml.p4d.24xlarge], instances: 2}}")
    assert plan.request["ResourceConfig"]["InstancePreferences"] == [
        {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "TrainingPlanArns": [PLAN]},
        {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2},
    ]
    assert plan.cost.usd_per_hour == plan_of("cluster.instances=2").cost.usd_per_hour


def test_each_type_can_have_its_own_count(plan_of: PlanOf) -> None:
    entry = "{instance_type: ml.g5.12xlarge, instances: 4}"
    plan = plan_of(f"cluster={{prefer: [ml.p4d.24xlarge, {entry}], instances: 2}}")
    counts = [
        each["InstanceCount"] for each in plan.request["ResourceConfig"]["InstancePreferences"]
    ]
    assert counts == [2, 4]
    assert (
        plan.cluster.instances,
        plan.cluster.processes_per_instance,
        plan.cluster.world_size,
    ) == (2, None, 16)
    assert plan.batch is not None
    assert plan.batch.global_ == 16 * 4 * 16
    assert (
        plan_of(f"cluster={{prefer: [{entry}, ml.p4d.24xlarge]}}", **local()).cluster.instances == 4
    )


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (
            "{prefer: [{instance_type: ml.p4d.24xlarge, instances: 3}, {instance_type: ml.g5.12xlarge, instances: 4}]}",
            "cluster.prefer: the types have different numbers of GPUs (3 x ml.p4d.24xlarge 8, 4 x ml.g5.12xlarge 4)",
        ),
        (
            "{prefer: [ml.p5.48xlarge, {instance_type: ml.p4d.24xlarge, instances: 4}], processes_per_instance: 8}",
            "cluster.prefer: the types have different numbers of instances, so the world size would depend on capacity",
        ),
        ("{prefer: [{instance_type: p4d.24xlarge}]}", 'did you mean "ml.p4d.24xlarge"?'),
        (
            "{prefer: [{instances: 2}]}",
            "cluster.prefer[0].instance_type: required field is missing",
        ),
        (
            "{prefer: [{instance_type: ml.p5.48xlarge, count: 2}]}",
            "cluster.prefer[0].count: unknown field",
        ),
        (
            f"{{prefer: [ml.p5.48xlarge], training_plan: '{PLAN}'}}",
            "cluster.training_plan: with prefer, each type has a training plan of its own; prefer: [{",
        ),
        (
            f"{{instance_type: ml.p5.48xlarge, spot: true, training_plan: '{PLAN}'}}",
            "cluster.training_plan: a training plan has reserved instances, and spot uses spare ones",
        ),
        (
            "{instance_type: ml.p5.48xlarge, training_plan: november}",
            'cluster.training_plan: expected the ARN of a training plan, got "november"; to list them: aws sagemaker',
        ),
        (
            f"{{instance_type: ml.p5.48xlarge, training_plan: '{ELSEWHERE}'}}",
            "cluster.training_plan: the training plan is in eu-west-1, but the job is in us-west-2",
        ),
        (
            f"{{prefer: [{{instance_type: ml.p5.48xlarge, training_plan: '{ELSEWHERE}'}}]}}",
            "cluster.prefer[0].training_plan: the training plan is in eu-west-1",
        ),
    ],
)
def test_wrong_capacity_is_refused(plan_of: PlanOf, cluster: str, expected: str) -> None:
    assert expected in refusal(plan_of, f"cluster={cluster}", settings=SETTINGS)


def test_a_job_of_a_training_plan_is_recognised() -> None:
    preferences = [
        {"InstanceType": "ml.p5.48xlarge", "TrainingPlanArns": [PLAN]},
        {"InstanceType": "ml.p4d.24xlarge"},
    ]
    assert uses_training_plan({"InstanceType": "ml.p5.48xlarge", "TrainingPlanArn": PLAN})
    assert not uses_training_plan({"InstanceType": "ml.p5.48xlarge"})
    assert not uses_training_plan({"InstancePreferences": preferences})
    assert uses_training_plan(
        {"InstancePreferences": preferences, "SelectedInstanceType": "ml.p5.48xlarge"}
    )
    assert not uses_training_plan(
        {"InstancePreferences": preferences, "SelectedInstanceType": "ml.p4d.24xlarge"}
    )


def test_a_ceiling_bounds_no_training_plan(plan_of: PlanOf) -> None:
    reserved = f"{{instance_type: ml.p5.48xlarge, training_plan: '{PLAN}'}}"
    said = "limits.cost does not limit the instances of a training plan"
    found = plan_of(f"cluster={reserved}", "limits.cost=900 USD")
    assert any(each.startswith(said) for each in found.warnings)
    mixed = f"{{prefer: [{reserved}, ml.p4d.24xlarge]}}"
    # The type on demand is bounded.
    assert not any(
        said in each for each in plan_of(f"cluster={mixed}", "limits.cost=900 USD").warnings
    )
    assert not any(said in each for each in plan_of("limits.cost=900 USD").warnings)


PREFERRED = f"{{instance_type: ml.g5.12xlarge, training_plan: '{PLAN}'}}"
TOPIC = "arn:aws:sns:eu-west-1:123456789012:training"
FUNCTION = "arn:aws:lambda:eu-west-1:123456789012:function:login"
REGISTRY = (
    f"{{uri: 'registry.example.com/train:1', private_registry: {{credentials: '{FUNCTION}'}}}}"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [f"cluster={{instance_type: ml.g5.12xlarge, training_plan: '{PLAN}'}}"],
            "cluster.training_plan: no training plan can reserve ml.g5.12xlarge (model of botocore",
        ),
        (
            [f"cluster={{prefer: [{PREFERRED}]}}"],
            "cluster.prefer[0].training_plan: no training plan can reserve ml.g5.12xlarge",
        ),
        (
            [
                "cluster={prefer: [ml.p4d.24xlarge]}",
                "request={ResourceConfig: {InstancePlacementConfig: {EnableMultipleJobs: true}}}",
            ],
            "request.ResourceConfig.InstancePlacementConfig: SageMaker does not accept a placement on UltraServers",
        ),
        (
            [f"notify={{sns: '{TOPIC}'}}"],
            "notify.sns: the topic is in eu-west-1, but the job is in",
        ),
        (
            [f"cluster.image={REGISTRY}"],
            "cluster.image.private_registry.credentials: the function is in eu-west-1, but the job is",
        ),
    ],
)
def test_what_aws_documents_is_refused_in_the_plan(
    plan_of: PlanOf, changes: list[str], message: str
) -> None:
    assert message in refusal(plan_of, *changes)


def test_training_plans_of_reservable_types_are_planned(plan_of: PlanOf) -> None:
    for name in ("ml.p4de.24xlarge", "ml.p5en.48xlarge", "ml.p6-b300.48xlarge"):
        assert name in service_limits.reservable_types()
        assert plan_of(f"cluster={{instance_type: {name}, training_plan: '{PLAN}'}}").request


def test_arns_of_the_jobs_region_and_of_secrets_are_planned(plan_of: PlanOf) -> None:
    secret = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:team/wandb-AbCdEf"
    plan_of(
        f"notify={{sns: '{TOPIC.replace('eu-west-1', 'us-west-2')}'}}",
        f"code.env={{WANDB_API_KEY: {{secret: '{secret}'}}}}",
    )


@pytest.mark.parametrize(
    ("cluster", "is_ineffective"),
    [
        ("{instance_type: ml.m5.xlarge, max_pending: 1h}", True),
        ("{prefer: [ml.m5.xlarge, ml.c5.xlarge], max_pending: 1h}", True),
        ("{instance_type: ml.g5.xlarge, max_pending: 1h}", False),
        ("{instance_type: ml.m5.xlarge}", False),
    ],
)
def test_a_pending_limit_needs_accelerators(
    plan_of: PlanOf, cluster: str, is_ineffective: bool
) -> None:
    found = plan_of(f"cluster={cluster}").warnings
    assert is_ineffective == any(
        each.startswith("cluster.max_pending is ignored for ml.m5.xlarge") for each in found
    )


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (["limits.runtime=6d"], "limits.runtime is 6d (default 5d); cloudtrain check"),
        (["cluster.instances=21"], "21 instances (default 20)"),
        (
            ["limits.runtime=6d", "cluster.instances=21"],
            "(default 5d) and 21 instances (default 20)",
        ),
        (["limits.runtime=5d", "cluster.instances=20"], ""),
    ],
)
def test_more_than_a_default_quota_is_a_note(
    plan_of: PlanOf, changes: list[str], note: str
) -> None:
    plan = plan_of(*changes)
    found = [each for each in plan.decisions if each.startswith("quotas: ")]
    assert not any("quota" in each for each in plan.warnings)
    assert bool(found) == bool(note)
    assert all(note in each for each in found)
    assert not any(each.startswith("quotas: ") for each in plan_of(*changes, **local()).decisions)
