"""Output about prices and costs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

from cloudtrain.console import command_name, print_columns, print_message, print_text
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_usd

if TYPE_CHECKING:
    from cloudtrain.catalog import Prices
    from cloudtrain.features.costs.cost_explorer import Billed
    from cloudtrain.features.costs.sums import CostGroup, Costs


def prices_to_json(prices: Prices, region: str, today: date) -> dict[str, Any]:
    """Return the prices of a region, including CPU instances, each with its date and source."""
    table = prices.by_region.get(region, {})
    return {
        "region": region,
        "as_of": prices.as_of(region),
        "age_days": prices.age_days(region, today),
        "prices": {
            name: {
                "usd_per_hour": price.usd_per_hour,
                "as_of": price.as_of,
                "source": price.source.name,
            }
            for name, price in sorted(table.items())
        },
        "unknown": list(_unpriced_fabric_types(prices, region)),
    }


def _unpriced_fabric_types(prices: Prices, region: str) -> Iterator[str]:
    """Yield the GPU types with EFA, of which clusters are made, that have no known price in a region."""
    from cloudtrain.catalog import find_instance, instance_names

    for name in instance_names():
        instance = find_instance(name)
        if (
            instance is not None
            and instance.gpus
            and instance.efa
            and prices.find(name, region) is None
        ):
            yield name


def print_prices(prices: Prices, region: str, today: date) -> None:
    """Print the prices and their age of a region's GPU instances, cheapest first."""
    from cloudtrain.catalog import find_instance

    table = prices.by_region.get(region, {})
    if not table:
        print(f"no price is known for {region}; known regions: {', '.join(prices.regions)}")
        print(
            f"to fetch them, with AWS credentials: {command_name()} prices --region {region} --refresh"
        )
        return
    rows = []
    for name, price in sorted(table.items(), key=lambda entry: (entry[1].usd_per_hour, entry[0])):
        instance = find_instance(name)
        if instance is not None and instance.gpus:
            each = price.usd_per_hour / instance.gpus
            gpus = f"{instance.gpus} x {instance.gpu}"
            rows.append((name, gpus, f"{price.usd_per_hour:,.4f}", f"{each:,.4f}", price.as_of))
    print_columns([("instance type", "GPUs", "USD/hour", "USD/GPU-hour", "as of"), *rows])
    others = len(table) - len(rows)
    age = prices.age_days(region, today)
    if age is not None:
        print(f"{region}: the oldest price is of {prices.as_of(region)}, {count(age, 'day')} ago")
    if unknown := list(_unpriced_fabric_types(prices, region)):
        print(f"unknown: {', '.join(unknown)}")
    if others:
        print(
            f"{others} instance types without GPUs: {command_name()} prices --region {region} --json"
        )
    for source in dict.fromkeys(price.source for price in table.values()):
        print(f"source of {source.date}: {source.name}")


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
        _print_billed(costs.billed)


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


def _print_billed(billed: Billed) -> None:
    estimated = ", which AWS may still change" if billed.is_estimated else ""
    print_text(
        f"\nCost Explorer, {billed.since} to {billed.until} (exclusive): {format_usd(billed.training_usd)} for training "
        f"instances, {format_usd(billed.sagemaker_usd)} for SageMaker{estimated}"
    )
    usages = list(billed.by_usage.items())
    print_columns(
        [("usage", "USD"), *((name, f"{usd:,.2f}") for name, usd in usages[:_MOST_USAGES])]
    )
    print_message(
        f"{count(billed.requests, 'request')} of Cost Explorer, each of which AWS bills. "
        "Its figure has the days of the usage, all jobs and regions of the account, and discounts"
    )


def print_costs_csv(costs: Costs) -> None:
    """Print the groups and the total as CSV."""
    rows = [group.to_json() for group in (*costs.groups, costs.total)]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _print_missing(costs)
