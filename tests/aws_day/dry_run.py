"""What the day would send and cost, without asking AWS."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from aws_day.bench import Bench
from aws_day.budget import Ledger, OverBudgetError


def show(benches: Sequence[Bench], without_plan: Mapping[str, str], budget_usd: float) -> None:
    """Print the requests that would be sent, one line of JSON for each job, then the largest possible bill.

    Args:
        benches: The trials with plans, the cheapest first.
        without_plan: Why other trials have no plan, by their names.
        budget_usd: The budget.
    """
    for bench in benches:
        for name, plan in bench.plans.items():
            count = bench.trial.starts.get(name, 1)
            print(f"# {bench.trial.name}: {name}, starts at most: {count}")
            print(json.dumps(plan.request))
    print("trial          starts  largest bill")
    total = 0.0
    ledger = Ledger(budget_usd)
    for bench in benches:
        usd = bench.largest_bill()
        starts = sum(bench.trial.starts.get(name, 1) for name in bench.plans)
        row = f"{bench.trial.name:13}  {starts:6}"
        if usd is None:
            print(f"{row}  not run: no price of {bench.trial.instance_type} is known")
            continue
        try:
            ledger.reserve(bench.trial.name, usd)
        except OverBudgetError as error:
            print(f"{row}  not run, unless bills are smaller than reservations: {error}")
            continue
        total += usd
        print(f"{row}  {usd:8.2f} USD")
    for name, reason in without_plan.items():
        print(f"{name:13}  {reason}")
    print(f"largest possible bill: {total:.2f} USD of a budget of {budget_usd:.2f} USD")
    print(
        "nothing was sent and AWS was asked nothing; quotas are checked by the day itself, before each trial"
    )
    print("to start the day, leave DRY_RUN out: any value of it, 0 too, is a dry run")


def why_nothing_runs(
    benches: Sequence[Bench], without_plan: Mapping[str, str], budget_usd: float
) -> str:
    """Return why no trial can run, in a line; an empty string if one can."""
    if not benches:
        reasons = [f"{name}: {' '.join(why.split())}" for name, why in without_plan.items()]
        return f"no trial can run: {reasons[0]}" if reasons else "no trial can run"
    bills = [usd for bench in benches if (usd := bench.largest_bill()) is not None]
    if not bills:
        region = benches[0].account.settings.region
        return (
            f"no trial can run: no price in {region} is known:"
            f" cloudtrain prices --region {region} --refresh fetches them"
        )
    # As much as the ledger accepts; see its `reserve`.
    if min(bills) <= budget_usd + 1e-9:
        return ""
    needed = math.ceil(min(bills) * 100) / 100
    return (
        f"no trial can run: BUDGET={budget_usd:g} is too small:"
        f" the cheapest trial needs BUDGET={needed:.2f}"
    )
