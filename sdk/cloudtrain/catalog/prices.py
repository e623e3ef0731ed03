"""Prices per hour and region: those that come with cloudtrain, and newer ones that a refresh has written."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from cloudtrain.catalog.source import Source, load
from cloudtrain.errors import SettingsError


@dataclass(frozen=True)
class Price:
    """What one instance costs.

    Attributes:
        usd_per_hour: On-demand price of one instance in USD per hour.
        source: Where it comes from.
    """

    usd_per_hour: float
    source: Source

    @property
    def as_of(self) -> str:
        """The day that the price is known for, as YYYY-MM-DD."""
        return self.source.date

    def age_days(self, today: date) -> int:
        """Return how many days ago that was; never negative."""
        return max((today - date.fromisoformat(self.as_of)).days, 0)


@dataclass(frozen=True)
class Prices:
    """Prices by region and instance type. Each has a source and a day of its own."""

    by_region: Mapping[str, Mapping[str, Price]]

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions with a price."""
        return tuple(self.by_region)

    def find(self, instance_type: str, region: str) -> Price | None:
        """Return the price of an instance type in a region, or None when it is not known."""
        return self.by_region.get(region, {}).get(instance_type)

    def usd_per_hour(self, instance_type: str, region: str) -> float | None:
        """Return the on-demand price of one instance in USD per hour, or None when it is not known."""
        price = self.find(instance_type, region)
        return None if price is None else price.usd_per_hour

    def as_of(self, region: str) -> str | None:
        """Return the day of the oldest price of a region, as YYYY-MM-DD, or None when it has none."""
        return min((price.as_of for price in self.by_region.get(region, {}).values()), default=None)

    def age_days(self, region: str, today: date) -> int | None:
        """Return the age of the oldest price of a region in days, or None when it has none."""
        return max((price.age_days(today) for price in self.by_region.get(region, {}).values()), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return what `read_prices` reads: a list of sources, and one table for each region and source."""
        keys: dict[Source, str] = {}
        tables: dict[tuple[str, str], dict[str, float]] = {}
        for region, prices in self.by_region.items():
            for name, price in prices.items():
                key = keys.setdefault(price.source, f"source-{len(keys) + 1}")
                tables.setdefault((region, key), {})[name] = price.usd_per_hour
        return {
            "sources": {key: source.to_json() for source, key in keys.items()},
            "tables": [
                {"region": region, "source": key, "usd_per_hour": table} for (region, key), table in tables.items()
            ],
        }


@functools.cache
def bundled_prices() -> Prices:
    """Return the prices that come with cloudtrain."""
    return _prices(load("prices"))


def read_prices(path: Path) -> Prices:
    """Return the prices that a refresh has written; none when there is no such file.

    Raises:
        SettingsError: the file cannot be read or is not one that a refresh has written.
    """
    try:
        return _prices(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Prices({})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (
            str(error) if isinstance(error, (OSError, ValueError)) else "not the tables of prices that it should hold"
        )
        raise SettingsError(
            f"{path}: cannot be read: {reason}", "remove the file, and fetch again: cloudtrain prices --refresh"
        ) from None


def merge_newest(*several: Prices) -> Prices:
    """Return the newest price of each instance type and region; of two from one day, the later argument's."""
    merged: dict[str, dict[str, Price]] = {}
    for prices in several:
        for region, table in prices.by_region.items():
            known = merged.setdefault(region, {})
            known.update({name: price for name, price in table.items() if _is_newer(price, known.get(name))})
    return Prices(merged)


def usd_per_hour(instance_type: str, region: str) -> float | None:
    """Return the price that comes with cloudtrain, in USD per hour, or None when there is none."""
    return bundled_prices().usd_per_hour(instance_type, region)


def price_date(region: str | None = None) -> str:
    """Return the day of a region's oldest bundled price, as YYYY-MM-DD; by default the first region's."""
    first = priced_regions()[0]
    return bundled_prices().as_of(region or first) or bundled_prices().as_of(first) or ""


def priced_regions() -> tuple[str, ...]:
    """Return the regions for which prices come with cloudtrain."""
    return bundled_prices().regions


def _prices(content: Any) -> Prices:
    sources = {key: Source(**source) for key, source in content["sources"].items()}
    for source in sources.values():
        date.fromisoformat(source.date)
    by_region: dict[str, dict[str, Price]] = {}
    for table in content["tables"]:
        source = sources[table["source"]]
        prices = {name: Price(_positive(value), source) for name, value in table["usd_per_hour"].items()}
        by_region.setdefault(table["region"], {}).update(prices)
    return Prices(by_region)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is not a price")
    return float(value)


def _is_newer(price: Price, than: Price | None) -> bool:
    return than is None or price.as_of >= than.as_of
