"""Checks of what a run uses besides SageMaker: budgets, trackers, and the rule that sends a message at its end."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.job.job_fields import NOTIFY_TAG
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.tracking import MLFLOW_URI_VARIABLE, WANDB_URL, WANDB_URL_VARIABLE
from cloudtrain.preflight.base import CONNECT_SECONDS, CheckContext
from cloudtrain.support.checks import Check, failed, passed
from cloudtrain_runtime.contract.redaction import redact

_SAGEMAKER = "Amazon SageMaker"


def check_budget(context: CheckContext) -> Iterator[Check]:
    """Check that the run's estimate fits into every cost budget that includes SageMaker."""
    account = context.role.account
    pages = context.client("budgets").get_paginator("describe_budgets").paginate(AccountId=account)
    budgets = [
        budget for page in pages for budget in page.get("Budgets") or [] if _includes_run(budget)
    ]
    if not budgets:
        yield passed("budget", "no budget of the account includes this run")
        return
    tightest = min(budgets, key=_remaining_usd)
    name = tightest["BudgetName"]
    limit = float(tightest["BudgetLimit"]["Amount"])
    left_usd = _remaining_usd(tightest)
    cost = context.plan.cost.max_usd
    console = f"or raise it: Billing console, Budgets, {name}, Edit"
    period = str(tightest.get("TimeUnit", "")).lower()
    if left_usd <= 0:
        yield failed("budget", f"{name} is spent: {limit:,.2f} USD {period}", f"wait, {console}")
    elif cost is None:
        yield passed(
            "budget", f"{left_usd:,.2f} USD left of {name}; the cost of the run is unknown"
        )
    else:
        detail = f"{left_usd:,.2f} of {limit:,.2f} USD {period} left of {name}, the estimate of the run is {cost:,.2f} USD"
        fix = f'--set "limits.cost={math.floor(left_usd)} USD", {console}'
        if cost > left_usd:
            yield failed("budget", detail, fix)
        else:
            yield passed("budget", detail)


def _includes_run(budget: Mapping[str, Any]) -> bool:
    """Whether a budget includes the run's cost: a cost budget in US dollars for all services or SageMaker."""
    if budget.get("BudgetType") != "COST" or budget.get("BudgetLimit", {}).get("Unit") != "USD":
        return False
    filters = dict(budget.get("CostFilters") or {})
    services = filters.pop("Service", None)
    # A budget with filters by tags, accounts or expressions may or may not include the run.
    return (
        not filters
        and not budget.get("FilterExpression")
        and (services is None or _SAGEMAKER in services)
    )


def _remaining_usd(budget: Mapping[str, Any]) -> float:
    spent = float(budget.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0))
    return float(budget["BudgetLimit"]["Amount"]) - spent


def check_tracking(context: CheckContext) -> Iterator[Check]:
    """Ask the server for its health. Without an answer a run trains all the same, so this is a warning only."""
    uri = redact(context.plan.request["Environment"][MLFLOW_URI_VARIABLE])
    if not uri.startswith(("http://", "https://")):
        yield passed("tracking", f"{uri} (its permissions are part of the role's)")
        return
    yield _check_server("tracking", "tracking.mlflow", uri, page=f"{uri.rstrip('/')}/health")


def check_wandb(context: CheckContext) -> Iterator[Check]:
    """Ask Weights & Biases for any answer. Without one a run trains all the same, so this is a warning only."""
    variables = context.plan.request["Environment"]
    url = redact(variables.get(WANDB_URL_VARIABLE, WANDB_URL))
    advice = "; with mode: offline it keeps files for wandb sync"
    yield _check_server("wandb", "tracking.wandb", url, page=url, advice=advice)


def _check_server(name: str, field: str, url: str, *, page: str, advice: str = "") -> Check:
    """Ask a tracker's server for a page. Any answer is one, also a refusal such as 401."""
    try:
        with urllib.request.urlopen(page, timeout=CONNECT_SECONDS):  # noqa: S310 (of the job's own file)
            return passed(name, f"{url} answers")
    except urllib.error.HTTPError as error:
        return passed(name, f"{url} answers with status {error.code}")
    except (OSError, ValueError) as error:
        reason = redact(str(getattr(error, "reason", error)))
        warning = (
            f"{field}: {url} does not answer this machine ({reason}). A run that cannot reach it trains without it, "
            f"and reports how many values it has dropped{advice}"
        )
        return passed(name, f"{url} does not answer this machine", warning=warning)


def topic_of(plan: Plan) -> str | None:
    """Return the ARN of the topic that gets a message, or None."""
    return next(
        (str(tag["Value"]) for tag in plan.request["Tags"] if tag["Key"] == NOTIFY_TAG), None
    )


def check_notify(context: CheckContext) -> Iterator[Check]:
    """Check that an EventBridge rule sends to the topic. Without one the job runs, and no message is sent."""
    topic = topic_of(context.plan)
    rules = context.client("events").list_rule_names_by_target(TargetArn=topic)["RuleNames"]
    if rules:
        yield passed("notify", f"the rule {', '.join(rules)} sends to {topic}")
        return
    warning = f"no EventBridge rule sends to {topic}: apply infra/ with this topic in notify_topics"
    yield passed("notify", warning, warning=warning)
