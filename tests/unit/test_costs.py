"""Sums of `costs`: a simulated month, spot savings, lost work and unknown prices."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.jobs import Cli

from cloudtrain.features.costs.sums import LostWork, RunCost, measure_lost_work, sum_costs
from cloudtrain.runs.billing import Billing

START = datetime(2026, 11, 1, tzinfo=UTC)


def run_of(day: int, name: str, billing: Billing, **fields: Any) -> RunCost:
    moment = START + timedelta(days=day)
    run = f"sagemaker:{name}-{moment:%y%m%d-%H%M%S}-{day:06x}"
    return RunCost(run, "SUCCEEDED", moment, billing, group=name, **fields)


def test_a_simulated_month_equals_the_sum_by_hand() -> None:
    hosted = Billing(
        "ml.m5.xlarge", 2, "us-west-2", 0.5, 720 * 3600
    )  # 720 h of 2 instances at 0.25 USD
    serverless = Billing(region="us-west-2", usd_per_hour=None, billable_seconds=3600)
    on_demand = Billing("ml.p4d.24xlarge", 2, "us-west-2", 50.0, 7200, 7200)  # 2 h x 50 USD
    spot = Billing(
        "ml.g5.12xlarge", 1, "us-west-2", 8.0, 1350, 4500, is_spot=True
    )  # 0.375 h of 1.25 h x 8 USD
    pooled = Billing(
        "ml.g5.12xlarge", 1, "us-west-2", 8.0, 1800, 1800, 900
    )  # 0.5 h and 0.25 h of warm pool x 8 USD
    unknown = Billing("ml.p6-b200.48xlarge", 4, "us-west-2", None, 3600, 3600)
    runs = [
        *(run_of(day, "digits", on_demand) for day in range(10)),
        *(run_of(day, "gpt", spot) for day in range(10, 24)),
        run_of(24, "gpt", spot, lost=LostWork(repeated=900)),  # a fifth of 3 USD
        run_of(25, "digits", pooled),
        run_of(
            26, "digits", on_demand, has_failed=True, lost=LostWork(unsaved=1800)
        ),  # 0.5 h x 50 USD
        run_of(27, "digits", on_demand, has_failed=True),  # without a checkpoint, all 100 USD
        run_of(28, "huge", unknown),
        run_of(29, "digits", Billing()),  # a local run
        run_of(0, "digits", hosted, endpoint="digits"),
        run_of(1, "small", serverless, endpoint="small"),
    ]
    found = sum_costs(runs)
    sums = {group.name: group for group in (*found.groups, found.total)}
    assert sums["digits"].cost_usd == pytest.approx(10 * 100 + 6 + 100 + 100 + 360)
    assert sums["gpt"].cost_usd == pytest.approx(15 * 3)
    assert sums["total"].cost_usd == pytest.approx(1206 + 45 + 360)
    assert sums["total"].saved_usd == pytest.approx(15 * 7)
    assert sums["total"].interrupted_usd == pytest.approx(0.6)
    assert sums["total"].failed_usd == pytest.approx(25 + 100)
    assert sums["total"].instance_hours == pytest.approx(12 * 4 + 15 * 0.375 + 0.75 + 4 + 720 * 2)
    assert [group.name for group in found.groups] == ["digits", "gpt", "huge", "small"]
    assert (sums["huge"].cost_usd, sums["huge"].unpriced, sums["total"].unpriced) == (0, 1, 2)
    assert (sums["total"].runs, sums["total"].endpoints, len(found.endpoints)) == (30, 2, 2)
    assert found.missing == ("small is serverless: AWS bills its requests",)
    assert list(map(str, found.unknown_prices)) == [
        "ml.p6-b200.48xlarge in us-west-2: 1 run, 4.0 instance hours"
    ]


def test_a_restart_repeats_the_work_after_its_checkpoint() -> None:
    events = [
        {"event": "started", "step": 0, "time": 100.0},
        {"event": "checkpoint", "step": 50, "time": 160.0},
        {"event": "step", "step": 90, "time": 200.0},
        {"event": "started", "step": 50, "time": 300.0},
        {"event": "step", "step": 60, "time": 310.0},
        {"event": "started", "step": 50, "time": 400.0},  # nothing was saved since 300
        {"event": "checkpoint", "step": 100, "time": 460.0},
        {"event": "failed", "time": 490.0},
    ]
    assert measure_lost_work(events, 500.0) == LostWork(repeated=40 + 10, unsaved=40)
    assert measure_lost_work(events[:1], None) == LostWork()


def test_a_wrong_group_is_the_users_mistake(cli: Cli) -> None:
    done = cli("costs", "--by", "nam")
    assert (done.code, done.out) == (2, "")
    assert "costs cannot be grouped by 'nam'" in done.err
    assert 'did you mean "name"?' in done.err
