"""Prices per hour and region: the bundled ones, and newer ones from a refresh."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from cloudtrain.catalog.source import Source, load
from cloudtrain.errors import SettingsError
from cloudtrain_runtime.contract.strict_json import load_json


@dataclass(frozen=True)
class Price:
    """Price of one instance.

    Attributes:
        usd_per_hour: On-demand price of one instance in USD per hour.
        source: Source of the price.
    """

    usd_per_hour: float
    source: Source

    @property
    def as_of(self) -> str:
        """Date of the price, as YYYY-MM-DD."""
        return self.source.date


@dataclass(frozen=True)
class Prices:
    """Prices by region and instance type. Each has its own source and date."""

    by_region: Mapping[str, Mapping[str, Price]]
    """Training prices by region; the prices of endpoints by `hosting_key(region)`."""

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions with a price."""
        return tuple(region for region in self.by_region if "/" not in region)

    def find(self, instance_type: str, region: str) -> Price | None:
        """Return the price of an instance type in a region, or None if it is unknown."""
        return self.by_region.get(region, {}).get(instance_type)

    def usd_per_hour(self, instance_type: str, region: str) -> float | None:
        """Return the on-demand price of one instance in USD per hour, or None if it is unknown."""
        price = self.find(instance_type, region)
        return None if price is None else price.usd_per_hour

    def highest_usd_per_hour(self, instance_type: str) -> float | None:
        """Return the highest price of a training instance of this type in any region, or None if none is known."""
        found = (self.usd_per_hour(instance_type, region) for region in self.regions)
        return max((price for price in found if price is not None), default=None)

    def hosting_usd_per_hour(self, instance_type: str, region: str) -> float | None:
        """Return the price of an endpoint's instance in USD per hour; without one, that of a training instance."""
        price = self.find(instance_type, hosting_key(region))
        if price is None:
            return self.usd_per_hour(instance_type, region)
        return price.usd_per_hour

    def as_of(self, region: str) -> str | None:
        """Return the date of a region's oldest price, as YYYY-MM-DD, or None if it has no price."""
        return min((price.as_of for price in self.by_region.get(region, {}).values()), default=None)

    def age_days(self, region: str, today: date) -> int | None:
        """Return the age of a region's oldest price in days, never negative, or None if it has no price."""
        oldest = self.as_of(region)
        if oldest is None:
            return None
        return max((today - date.fromisoformat(oldest)).days, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a file for `read_prices`: sources, and one table for each region and source."""
        keys: dict[Source, str] = {}
        tables: dict[tuple[str, str], dict[str, float]] = {}
        for region, prices in self.by_region.items():
            for name, price in prices.items():
                key = keys.setdefault(price.source, f"source-{len(keys) + 1}")
                tables.setdefault((region, key), {})[name] = price.usd_per_hour
        return {
            "sources": {key: asdict(source) for source, key in keys.items()},
            "tables": [
                {"region": region, "source": key, "usd_per_hour": table}
                for (region, key), table in tables.items()
            ],
        }


def hosting_key(region: str) -> str:
    """Return the key of a region's prices of endpoints."""
    return f"{region}/hosting"


@functools.cache
def bundled_prices() -> Prices:
    """Return the bundled prices."""
    return _prices(load("prices"))


def read_prices(path: Path) -> Prices:
    """Return the prices in a file that a refresh wrote; none if the file does not exist.

    Raises:
        SettingsError: the file cannot be read, or a refresh did not write it.
    """
    try:
        return _prices(load_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Prices({})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "not the tables of prices that it should hold"
        if isinstance(error, (OSError, ValueError)):
            reason = str(error)
        raise SettingsError(
            f"{path}: cannot be read: {reason}",
            "remove the file, and fetch again: cloudtrain prices --refresh",
        ) from None


def merge_newest(*several: Prices) -> Prices:
    """Return the newest price of each instance type and region. For equal dates, the later argument wins."""
    merged: dict[str, dict[str, Price]] = {}
    for prices in several:
        for region, table in prices.by_region.items():
            known = merged.setdefault(region, {})
            for name, price in table.items():
                if name not in known or price.as_of >= known[name].as_of:
                    known[name] = price
    return Prices(merged)


def _prices(content: Any) -> Prices:
    sources = {key: Source(**source) for key, source in content["sources"].items()}
    for source in sources.values():
        date.fromisoformat(source.date)
    by_region: dict[str, dict[str, Price]] = {}
    for table in content["tables"]:
        source = sources[table["source"]]
        prices = {
            name: Price(_positive(value), source) for name, value in table["usd_per_hour"].items()
        }
        by_region.setdefault(table["region"], {}).update(prices)
    return Prices(by_region)


def _positive(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{value!r} is not a price")
    return float(value)
