"""Budgets of the account that this run would exceed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.preflight.base import (
    Check,
    CheckContext,
    failed,
    passed,
)

_SAGEMAKER = "Amazon SageMaker"


def check_budget(context: CheckContext) -> Iterator[Check]:
    """Check that every cost budget which counts SageMaker has room for the most that the run may cost."""
    account = context.role.account
    pages = context.client("budgets").get_paginator("describe_budgets").paginate(AccountId=account)
    budgets = [budget for page in pages for budget in page.get("Budgets") or [] if _counts(budget)]
    if not budgets:
        yield passed("budget", "no budget of the account counts this run")
        return
    tightest = min(budgets, key=_left)
    yield _judge(context, tightest, _left(tightest))


def _counts(budget: Mapping[str, Any]) -> bool:
    """Whether a budget counts what this run costs: money, in US dollars, of all services or of SageMaker."""
    if budget.get("BudgetType") != "COST" or budget.get("BudgetLimit", {}).get("Unit") != "USD":
        return False
    filters = dict(budget.get("CostFilters") or {})
    services = filters.pop("Service", None)
    # One that is filtered by tags, accounts or expressions may count it or not.
    return not filters and not budget.get("FilterExpression") and (services is None or _SAGEMAKER in services)


def _left(budget: Mapping[str, Any]) -> float:
    spent = float(budget.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0))
    return float(budget["BudgetLimit"]["Amount"]) - spent


def _judge(context: CheckContext, budget: Mapping[str, Any], left: float) -> Check:
    name, limit = budget["BudgetName"], float(budget["BudgetLimit"]["Amount"])
    cost = context.plan.cost.max_usd
    console = f"or raise it: Billing console, Budgets, {name}, Edit"
    period = str(budget.get("TimeUnit", "")).lower()
    if left <= 0:
        return failed("budget", f"{name} is spent: {limit:,.2f} USD {period}", f"wait, {console}")
    if cost is None:
        return passed("budget", f"{left:,.2f} USD left of {name}; what the run costs is not known")
    detail = f"{left:,.2f} of {limit:,.2f} USD {period} left of {name}, the run is estimated at {cost:,.2f} USD"
    if cost > left:
        return failed("budget", detail, f'--set "limits.cost={math.floor(left)} USD", {console}')
    return passed("budget", detail)
