"""Refresh of prices from the AWS Price List API, into a file beside the user's profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.retry import client_retries
from cloudtrain.aws.session import make_session
from cloudtrain.catalog import Price, Prices, Source, hosting_key, merge_newest, read_prices
from cloudtrain.errors import CloudError, SettingsError
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.aws_codes import DENIED
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_API_REGION = "us-east-1"
"""One of the API's three endpoints (the others: eu-central-1, ap-south-1); each returns the prices of all regions."""

_SERVICE = "AmazonSageMaker"
_PRODUCT_FAMILY = "ML Instance"
# Largest MaxResults of GetProducts (API reference).
_PAGE = 100

# Matches `USW2-Train:ml.p4d.24xlarge` and `USW2-Host:ml.m5.xlarge`, and not TrSpt (spot), Notebk, Studio:JupyterLab-,
# Cluster and TrainingPlanUpfrontFee, a one-time fee that is lower than the hourly price.
_USAGE = re.compile(r"(?:[A-Z0-9]+-)?(Train|Host):(ml\.[a-z0-9.-]+)")
_HOSTING = "Host"
_HOURS = "hrs"
_HINTS = dict.fromkeys(DENIED, "the credentials need the permission pricing:GetProducts on *")


def refresh_prices(region: str, path: Path, *, today: date) -> Prices:
    """Fetch a region's prices of training and endpoints and write them to a file; its other regions are unchanged.

    Args:
        region: The region.
        path: The file, which need not exist.
        today: Date of the prices.

    Returns:
        All prices of the file.

    Raises:
        CloudError: AWS rejected the request, is unreachable, or lacks prices for this region; the file is unchanged.
        SettingsError: The file cannot be read or written.
    """
    if region.startswith("cn-"):
        raise CloudError(
            f"the prices of {region} are in CNY, in a price list of its own",
            "plan without limits.cost",
        )
    before = read_prices(path)
    merged = merge_newest(before, _fetch_prices(region, today))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dump_json(merged.to_json(), indent=1))
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be written: {error}", "set XDG_CONFIG_HOME to a folder of yours"
        ) from None
    return merged


def _fetch_prices(region: str, today: date) -> Prices:
    """Return a region's on-demand prices of training and endpoints, from pricing:GetProducts, dated `today`.

    Raises:
        CloudError: AWS rejected the request, cannot be reached, or has no prices for this region.
    """
    found: dict[str, dict[str, float]] = {region: {}, hosting_key(region): {}}
    for text in _products(region):
        for kind, name, usd in _hourly_prices(text):
            table = found[hosting_key(region) if kind == _HOSTING else region]
            # With two offers for one type, take the higher price, so that a cost limit holds.
            table[name] = max(usd, table.get(name, 0.0))
    if not found[region]:
        raise CloudError(
            f"AWS's price list has no training prices for {region}", "check the region's name"
        )
    source = Source(
        name=f"AWS Price List API, {_SERVICE}, usage types Train and Host, on demand",
        url=f"https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/{_SERVICE}/current/{region}/index.json",
        date=today.isoformat(),
    )
    return Prices(
        {
            key: {name: Price(usd, source) for name, usd in sorted(table.items())}
            for key, table in found.items()
            if table
        }
    )


def _products(region: str) -> Iterator[str]:
    from botocore.config import Config

    filters = {"regionCode": region, "productFamily": _PRODUCT_FAMILY}
    with aws_errors("read the price list", _HINTS):
        config = Config(retries=client_retries())
        client = make_session().client("pricing", region_name=_API_REGION, config=config)
        pages = client.get_paginator("get_products").paginate(
            ServiceCode=_SERVICE,
            Filters=[
                {"Type": "TERM_MATCH", "Field": field, "Value": value}
                for field, value in filters.items()
            ],
            PaginationConfig={"PageSize": _PAGE},
        )
        for page in pages:
            yield from page.get("PriceList") or ()


def _hourly_prices(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield `Train` or `Host`, instance type and USD per hour of a product; nothing for other products."""
    try:
        item = load_json(text)
        usage = _USAGE.fullmatch(str(item["product"]["attributes"].get("usagetype", "")))
        if usage is None:
            return
        for term in item.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if dimension["unit"].lower() == _HOURS and usd > 0:
                    yield usage[1], usage[2], usd
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CloudError(
            f"could not read the price list: an entry has an unknown format: {text[:200]}",
            "no file was written; check AWS_ENDPOINT_URL",
        ) from None
