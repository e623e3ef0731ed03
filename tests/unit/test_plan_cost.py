"""The cost and the runtime of a plan."""

from __future__ import annotations

import dataclasses

import pytest
from support.plans import SETTINGS, PlanOf, refusal

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import Prices, bundled_prices
from cloudtrain.console.plans import print_plan


def test_the_estimate_counts_what_aws_bills_beyond_the_limit(
    plan_of: PlanOf, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = plan_of("limits.runtime=10h").cost
    assert cost.usd_per_hour == pytest.approx(50.5026)
    assert cost.max_usd == pytest.approx(508.37), (
        "ten hours, and the 238 s of a job that asked for 603 s and ran 841 s"
    )
    assert dataclasses.asdict(cost.over_limit_seconds) == {
        "stop": 120,
        "overrun": 118,
        "checkpoint_upload": 0,
        "warm_pool": 0,
    }
    print_plan(plan_of("limits.runtime=10h"))
    shown = capsys.readouterr().out
    assert "\nruntime       stopped after 10h\n" in shown
    assert "50.50 USD per hour, estimate 508.37 USD at its time limit (" in shown
    assert "limits.cost" not in shown
    assert "not covered" not in shown


def test_the_ceiling_and_what_it_does_not_cover_are_shown(
    plan_of: PlanOf, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of("limits.runtime=10h", "limits.cost=600 USD")
    assert (plan.cost.ceiling_usd, plan_of().cost.ceiling_usd) == (600, None)
    print_plan(plan)
    shown = capsys.readouterr().out
    assert "estimate 508.37 USD at its time limit, limits.cost 600.00 USD (" in shown
    assert (
        "\nnot covered   volumes, S3, CloudWatch and data transfer; what AWS bills later than 238 s after"
        in shown
    )
    assert plan.to_json()["cost"]["not_covered"] == plan.cost.not_covered
    share = "cluster.queue={name: q, quota_share: vision}"
    assert any(
        "preempts: limits.runtime holds for each" in each
        for each in plan_of(share).cost.not_covered
    )


def test_the_estimate_counts_the_upload_of_a_last_checkpoint(plan_of: PlanOf) -> None:
    without, sized = (
        plan_of("limits.runtime=1h").cost,
        plan_of("limits.runtime=1h", "checkpoint.size=50GB").cost,
    )
    assert sized.over_limit_seconds.checkpoint_upload == 100, (
        "50 GB from two instances at 250 MB/s each"
    )
    assert without.max_usd is not None
    assert sized.max_usd == pytest.approx(without.max_usd + 100 / 3600 * 50.502572, abs=0.011)


def test_only_the_types_without_a_price_are_named(plan_of: PlanOf) -> None:
    plan = plan_of("cluster={prefer: [ml.p4d.24xlarge, ml.p4de.24xlarge]}")
    assert any(
        "no price is known for ml.p4de.24xlarge in us-west-2" in warning
        for warning in plan.warnings
    )
    assert plan.cost.max_usd is None


def test_a_cost_limit_shortens_the_runtime_so_that_it_holds(plan_of: PlanOf) -> None:
    plan = plan_of("limits.cost=100 USD")
    assert plan.request["StoppingCondition"]["MaxRuntimeInSeconds"] == plan.max_runtime_seconds
    assert plan.cost.max_usd is not None
    assert 99.9 < plan.cost.max_usd <= 100, "with what AWS bills beyond the limit"
    assert any(
        "its estimate is at most 100 USD (limits.cost)" in decision for decision in plan.decisions
    )


def test_a_cost_limit_that_cannot_hold_is_refused(plan_of: PlanOf) -> None:
    assert "0.1 USD pays for 0s" in refusal(plan_of, "limits.cost=0.1 USD")
    unpriced = dataclasses.replace(SETTINGS, region="eu-west-1")
    assert "so limits.cost cannot be kept" in refusal(
        plan_of, "limits.cost=10 USD", settings=unpriced
    )


def test_cost_limit_never_shortens_a_requested_runtime(plan_of: PlanOf) -> None:
    text = refusal(plan_of, "limits={runtime: 10h, cost: 100 USD}")
    assert (
        "100 USD pays for 1h54m of 50.50 USD per hour, 3m58s of start-up, stop and upload beyond it; limits.r"
        in text
    )
    assert "raise it to 509 USD, or lower limits.runtime to 114m" in text
    assert plan_of("limits={runtime: 10h, cost: 509 USD}").max_runtime_seconds == 36000


def test_spot_estimate_uses_on_demand_price_and_max_wait(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.spot={max_wait: 20h}", "limits.runtime=10h")
    assert plan.cost.max_usd == pytest.approx((20 + 238 / 3600) * 50.502572, abs=0.01)
    plan = plan_of("cluster.spot=true", "limits.cost=100 USD")
    assert plan.max_wait_seconds == plan.max_runtime_seconds
    assert plan.cost.max_usd is not None
    assert plan.cost.max_usd <= 100
    text = refusal(plan_of, "cluster.spot={max_wait: 30h}", "limits.cost=500 USD")
    assert "cluster.spot.max_wait is 1d6h" in text


def test_a_warm_pool_is_paid_for(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.keep_alive=1h", "limits.runtime=1h")
    assert plan.cost.max_usd == pytest.approx((2 + 238 / 3600) * 50.502572, abs=0.01)
    assert plan.cost.warm_pool_usd == pytest.approx(50.502572, abs=0.01)
    assert plan.warnings == plan_of().warnings
    assert plan_of().cost.warm_pool_usd == 0
    assert (
        plan_of("cluster.keep_alive=1h", "limits.cost=100 USD").max_runtime_seconds
        == 7128 - 3600 - 238
    )


def test_a_warm_pool_of_more_than_the_guide_allows_is_a_warning(plan_of: PlanOf) -> None:
    assert any(
        "AWS documents at most 1h; its API accepts 2h" in each
        for each in plan_of("cluster.keep_alive=2h").warnings
    )


def test_the_most_expensive_preference_bounds_the_cost(plan_of: PlanOf) -> None:
    cheap = plan_of("cluster={prefer: [ml.g5.xlarge]}").cost.usd_per_hour
    both = plan_of("cluster={prefer: [ml.g5.xlarge, ml.g5.8xlarge]}").cost.usd_per_hour
    assert cheap is not None
    assert both is not None
    assert both > 2 * cheap


def test_a_plan_has_the_length_that_is_known(plan_of: PlanOf) -> None:
    length = plan_of("train={steps: 1000, batch_size: 16}", "checkpoint.every=300 steps").length
    assert (length.steps, length.samples, length.checkpoints) == (1000, 1000 * 16 * 16, 4)
    length = plan_of("limits.runtime=1h").length
    assert (length.steps, length.epochs, length.checkpoints) == (None, 3, 7)


def test_a_default_runtime_is_reduced_to_max_wait(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.spot={max_wait: 2h}")
    assert (plan.max_runtime_seconds, plan.max_wait_seconds) == (7200, 7200)


@pytest.mark.parametrize(
    ("cluster", "hours", "is_costly"),
    [
        # 24 hours and 238 s, 8 accelerators each.
        ("{instance_type: ml.p6-b200.48xlarge}", 192.5, True),
        ("{instance_type: ml.p5.48xlarge}", 192.5, True),
        # Prices of us-west-2 are a guide: 8 A10G for 24 hours are 341 USD, and 192 of them 3,920 USD.
        ("{instance_type: ml.g5.12xlarge, instances: 2}", 192.5, False),
        ("{instance_type: ml.g5.48xlarge, instances: 8}", 1540.2, True),
        ("{instance_type: ml.m5.4xlarge, instances: 2}", 0.0, False),
        ("{instance_type: ml.m5.4xlarge, instances: 60}", 0.0, True),
        ("{prefer: [ml.g5.12xlarge, ml.p6-b200.48xlarge], instances: 1}", 192.5, True),
    ],
)
def test_costly_jobs_are_known_without_a_price(
    plan_of: PlanOf, cluster: str, hours: float, is_costly: bool
) -> None:
    changes = [f"cluster={cluster}"]
    if "prefer" in cluster:
        changes = [changes[0].replace("}", ", processes_per_instance: 4}")]
    cost = plan_of(*changes, **in_region("eu-west-1")).cost
    assert (cost.max_usd, cost.accelerator_hours, cost.is_costly) == (None, hours, is_costly)


def test_costly_jobs_are_known_without_any_price(plan_of: PlanOf) -> None:
    """An empty table, as for types that no region has a price for."""
    for cluster, is_costly in (
        ("{instance_type: ml.p4d.24xlarge}", True),
        ("{instance_type: ml.g5.xlarge, instances: 5}", False),
        ("{instance_type: ml.m5.24xlarge, instances: 9}", False),
    ):
        assert (
            plan_of(f"cluster={cluster}", **in_region("us-west-2", Prices({}))).cost.is_costly
            == is_costly
        )


def test_a_known_price_decides_alone(plan_of: PlanOf) -> None:
    few, many = plan_of("limits.runtime=1h").cost, plan_of("limits.runtime=48h").cost
    assert (few.is_costly, many.is_costly) == (False, True)
    assert few.accelerator_hours == many.accelerator_hours == 0


def in_region(region: str, prices: Prices | None = None) -> dict[str, SageMakerTarget]:
    """Return the argument that plans in another region, or with other prices."""
    settings = dataclasses.replace(SETTINGS, region=region)
    return {"target": SageMakerTarget(settings, bundled_prices() if prices is None else prices)}
