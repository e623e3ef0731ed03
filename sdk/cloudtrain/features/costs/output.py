"""Output about prices and costs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

from cloudtrain.console import command_name, print_message, print_text
from cloudtrain.console.facts import print_sentence
from cloudtrain.console.tables import Cell, Column, print_table
from cloudtrain.console.terminal import is_terminal
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


_PRICE_COLUMNS = (
    Column("instance type"),
    Column("GPUs", drop=2),
    Column("USD/hour", is_number=True),
    Column("USD/GPU-hour", is_number=True),
    Column("as of", drop=1),
)


def print_prices(prices: Prices, region: str, today: date) -> None:
    """Print the prices and their age of a region's GPU instances, cheapest first."""
    from cloudtrain.catalog import find_instance

    table = prices.by_region.get(region, {})
    if not table:
        print_sentence(
            f"no price is known for {region}; known regions: {', '.join(prices.regions)}"
        )
        print_sentence(
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
    print_table(_PRICE_COLUMNS, rows)
    others = len(table) - len(rows)
    age = prices.age_days(region, today)
    if age is not None:
        print(f"{region}: the oldest price is of {prices.as_of(region)}, {count(age, 'day')} ago")
    if unknown := list(_unpriced_fabric_types(prices, region)):
        print_sentence(f"unknown: {', '.join(unknown)}")
    if others:
        print_sentence(
            f"{others} instance types without GPUs: {command_name()} prices --region {region} --json"
        )
    for source in dict.fromkeys(price.source for price in table.values()):
        print_sentence(f"source of {source.date}: {source.name}")


_MOST_USAGES = 5
_DEFAULT_GROUP = "name"


def print_costs(costs: Costs) -> None:
    """Print a row per group and the total; what the sums lack goes to standard error.

    Runs of this machine, which AWS does not bill, are one line. In a pipe they are also in the rows of other groups
    than the default ones.
    """
    if not costs.runs and not costs.endpoints:
        print_text("no run in this period")
    else:
        _print_groups(costs)
    _print_missing(costs)
    if costs.unknown_prices:
        print_sentence(
            f"fetch AWS's prices: {command_name()} prices --region REGION --refresh", print_message
        )
    if costs.billed is not None:
        _print_billed(costs.billed)


def _print_groups(costs: Costs) -> None:
    shown = costs if _shows_free_groups(costs) else costs.without_free_runs()
    if shown.groups:
        rows = [_row(group, group.name or "(none)") for group in shown.groups]
        if len(rows) > 1:
            rows.append(_row(shown.total, "total"))
        print_table(_columns(costs), rows)
    if costs.is_simulated:
        print_sentence("in the sandbox nothing is billed: this is what the account would have paid")
    if free := costs.describe_free_runs():
        print_sentence(free)


def _shows_free_groups(costs: Costs) -> bool:
    """Return whether runs of this machine are in the rows: for a script that asked for groups, such as users."""
    return costs.by != _DEFAULT_GROUP and not is_terminal()


def _columns(costs: Costs) -> list[Column]:
    """Return the columns of the sums; a terminal has those that are not zero everywhere."""
    usd = "would cost USD" if costs.is_simulated else "USD"
    return [
        Column(costs.by, least=16),
        Column("runs", is_number=True, drop=5),
        Column("endpoints", is_number=True, drop=4),
        Column("instance hours", title="HOURS", is_number=True, drop=6),
        Column(usd, is_number=True),
        Column("saved by spot", is_number=True, drop=1),
        Column("lost: interrupted", title="INTERRUPTED", is_number=True, drop=2),
        Column("lost: failed", title="FAILED", is_number=True, drop=3),
    ]


def _print_missing(costs: Costs) -> None:
    for each in costs.unknown_prices:
        print_sentence(f"not in the sums, because no price is known: {each}", print_message)
    for text in costs.missing:
        print_sentence(f"not in the sums: {text}", print_message)


def _row(group: CostGroup, name: str) -> list[str | Cell]:
    more = f" + {group.unpriced} without a price" if group.unpriced else ""
    amounts = (group.saved_usd, group.interrupted_usd, group.failed_usd)
    return [
        name,
        _seen(f"{group.runs}", group.runs),
        _seen(f"{group.endpoints}", group.endpoints),
        f"{group.instance_hours:,.1f}",
        f"{group.cost_usd:,.2f}{more}",
        *(_seen(f"{usd:,.2f}", usd) for usd in amounts),
    ]


def _seen(text: str, value: float) -> Cell:
    """Return a cell that is empty on a terminal where the value is zero."""
    return Cell(text, shown=text if value else "")


def _print_billed(billed: Billed) -> None:
    estimated = ", which AWS may still change" if billed.is_estimated else ""
    print_text("")
    print_sentence(
        f"Cost Explorer, {billed.since} to {billed.until} (exclusive): {format_usd(billed.training_usd)} for training "
        f"instances, {format_usd(billed.sagemaker_usd)} for SageMaker{estimated}"
    )
    usages = list(billed.by_usage.items())
    print_table(
        (Column("usage", least=30), Column("USD", is_number=True)),
        [(name, f"{usd:,.2f}") for name, usd in usages[:_MOST_USAGES]],
    )
    print_sentence(
        f"{count(billed.requests, 'request')} of Cost Explorer, each of which AWS bills. "
        "Its figure has the days of the usage, all jobs and regions of the account, and discounts",
        print_message,
    )


def print_costs_csv(costs: Costs) -> None:
    """Print the groups and the total as CSV."""
    rows = [group.to_json() for group in (*costs.groups, costs.total)]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _print_missing(costs)
