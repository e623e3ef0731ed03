"""Check of the account's budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.preflight.base import Check, CheckContext, failed, passed

_SAGEMAKER = "Amazon SageMaker"


def check_budget(context: CheckContext) -> Iterator[Check]:
    """Check that the run's estimate fits into every cost budget that includes SageMaker."""
    account = context.role.account
    pages = context.client("budgets").get_paginator("describe_budgets").paginate(AccountId=account)
    budgets = [budget for page in pages for budget in page.get("Budgets") or [] if _includes_run(budget)]
    if not budgets:
        yield passed("budget", "no budget of the account includes this run")
        return
    tightest = min(budgets, key=_remaining_usd)
    name, limit, left_usd = tightest["BudgetName"], float(tightest["BudgetLimit"]["Amount"]), _remaining_usd(tightest)
    cost = context.plan.cost.max_usd
    console = f"or raise it: Billing console, Budgets, {name}, Edit"
    period = str(tightest.get("TimeUnit", "")).lower()
    if left_usd <= 0:
        yield failed("budget", f"{name} is spent: {limit:,.2f} USD {period}", f"wait, {console}")
    elif cost is None:
        yield passed("budget", f"{left_usd:,.2f} USD left of {name}; the cost of the run is unknown")
    else:
        detail = (
            f"{left_usd:,.2f} of {limit:,.2f} USD {period} left of {name}, the estimate of the run is {cost:,.2f} USD"
        )
        fix = f'--set "limits.cost={math.floor(left_usd)} USD", {console}'
        yield failed("budget", detail, fix) if cost > left_usd else passed("budget", detail)


def _includes_run(budget: Mapping[str, Any]) -> bool:
    """Whether a budget includes the run's cost: a cost budget in US dollars for all services or SageMaker."""
    if budget.get("BudgetType") != "COST" or budget.get("BudgetLimit", {}).get("Unit") != "USD":
        return False
    filters = dict(budget.get("CostFilters") or {})
    services = filters.pop("Service", None)
    # A budget with filters by tags, accounts or expressions may or may not include the run.
    return not filters and not budget.get("FilterExpression") and (services is None or _SAGEMAKER in services)


def _remaining_usd(budget: Mapping[str, Any]) -> float:
    spent = float(budget.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0))
    return float(budget["BudgetLimit"]["Amount"]) - spent
