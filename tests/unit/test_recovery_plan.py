"""`limits.recover` in a plan: what all attempts may cost, and limits that cannot hold."""

from __future__ import annotations

import pytest
from support.plans import SETTINGS, PlanOf, local, refusal

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import Prices

ONE_ATTEMPT = "limits.runtime=10h"
"""It may cost 508.37 USD."""


@pytest.mark.parametrize(
    ("recover", "most", "usd"),
    [
        ("on", "5 attempts in 14d, after an outside cause", "2,541.85"),
        ("{attempts: 2, time: 1d}", "2 attempts in 1d, after an outside cause", "1,016.74"),
        ("{cost: 800 USD}", "5 attempts in 14d, after an outside cause", "800.00"),
        ("{on: [time_limit, capacity]}", "5 attempts in 14d, after time limit or capacity", "2,541.85"),
    ],
)  # fmt: skip
def test_a_plan_says_what_all_attempts_may_cost(
    plan_of: PlanOf, recover: str, most: str, usd: str
) -> None:
    told = f"limits.recover: at most {most}; together they may cost {usd} USD"
    decisions = plan_of(ONE_ATTEMPT, f"limits.recover={recover}").decisions
    assert [each for each in decisions if "recover" in each] == [told]
    assert not any("recover" in each for each in plan_of(ONE_ATTEMPT).decisions)


@pytest.mark.parametrize("recover", ["{on: []}", "{time: 0s}", "{attempts: 0}"])
def test_a_limit_under_which_nothing_continues_is_refused(plan_of: PlanOf, recover: str) -> None:
    assert "limits.recover" in refusal(plan_of, ONE_ATTEMPT, f"limits.recover={recover}")


def test_a_limit_that_does_not_pay_for_one_attempt_is_refused(plan_of: PlanOf) -> None:
    told = refusal(plan_of, ONE_ATTEMPT, "limits.recover={cost: 500 USD}")
    assert "limits.recover" in told
    assert "one attempt may cost 508.37 USD, and all together 500 USD" in told
    assert "raise it to 509 USD, or lower limits.runtime" in told


def test_a_limit_without_a_price_is_refused(plan_of: PlanOf) -> None:
    target = SageMakerTarget(SETTINGS, Prices({}))
    told = refusal(plan_of, "limits.recover={cost: 500 USD}", target=target)
    assert "it cannot be kept without a known price" in told
    plan_of("limits.recover=on", target=target)


def test_a_run_on_this_machine_costs_nothing(plan_of: PlanOf) -> None:
    decisions = plan_of("limits.recover={cost: 1 USD}", **local()).decisions
    assert "limits.recover: at most 5 attempts in 14d, after an outside cause" in decisions
