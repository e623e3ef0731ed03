"""Output of `costs`: the sums by group, prices that are unknown, and what Cost Explorer reports."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING

from cloudtrain.console import print_columns, print_message, print_text

if TYPE_CHECKING:
    from cloudtrain.runs.spending import CostGroup, Costs

_HEADER = ("instance hours", "USD", "saved by spot", "lost: interrupted", "lost: failed")
_MOST_USAGES = 5


def print_costs(costs: Costs) -> None:
    """Print a row per group and the total; what the sums lack goes to standard error."""
    if not costs.runs and not costs.endpoints:
        print_text("no run in this period")
    else:
        header = (costs.by, "runs", "endpoints", *_HEADER)
        rows = [_row(group, group.name or "(none)") for group in costs.groups]
        if len(rows) > 1:
            rows.append(_row(costs.total, "total"))
        print_columns([header, *rows])
    _print_missing(costs)
    if costs.unknown_prices:
        print_message("fetch AWS's prices: cloudtrain prices --region REGION --refresh")
    if costs.billed is not None:
        _print_billed(costs)


def _print_missing(costs: Costs) -> None:
    for each in costs.unknown_prices:
        print_message(f"not in the sums, because no price is known: {each}")
    for text in costs.missing:
        print_message(f"not in the sums: {text}")


def _row(group: CostGroup, name: str) -> tuple[str, ...]:
    more = f" + {group.unpriced} without a price" if group.unpriced else ""
    amounts = (group.saved_usd, group.interrupted_usd, group.failed_usd)
    return (
        name,
        f"{group.runs}",
        f"{group.endpoints}",
        f"{group.instance_hours:,.1f}",
        f"{group.cost_usd:,.2f}{more}",
        *(f"{usd:,.2f}" for usd in amounts),
    )


def _print_billed(costs: Costs) -> None:
    billed = costs.billed
    if billed is None:
        return
    estimated = ", which AWS may still change" if billed.is_estimated else ""
    print_text(
        f"\nCost Explorer, {billed.since} to {billed.until} (exclusive): {billed.training_usd:,.2f} USD for training "
        f"instances, {billed.sagemaker_usd:,.2f} USD for SageMaker{estimated}"
    )
    usages = list(billed.by_usage.items())
    print_columns([("usage", "USD"), *((name, f"{usd:,.2f}") for name, usd in usages[:_MOST_USAGES])])
    print_message(
        f"{billed.requests} request{'' if billed.requests == 1 else 's'} of Cost Explorer, each of which AWS bills. "
        "Its figure has the days of the usage, all jobs and regions of the account, and discounts"
    )


def print_costs_csv(costs: Costs) -> None:
    """Print the groups and the total as CSV."""
    rows = [group.to_json() for group in (*costs.groups, costs.total)]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _print_missing(costs)
