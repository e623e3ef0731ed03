"""Refresh prices from the AWS Price List API, into a file beside the user's profile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.retry import client_retries
from cloudtrain.catalog import Price, Prices, Source, merge_newest, read_prices
from cloudtrain.errors import CloudError, SettingsError
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.strict_json import dump_json

_API_REGION = "us-east-1"
"""One of the API's three endpoints (the others: eu-central-1, ap-south-1); each knows the prices of all regions."""

_SERVICE = "AmazonSageMaker"
_PRODUCT_FAMILY = "ML Instance"
_PAGE = 100  # the most that GetProducts gives at once (API reference, MaxResults)

# `USW2-Train:ml.p4d.24xlarge`. Others must not pass: TrSpt (spot), Host, Notebk, Studio:JupyterLab-, Cluster, and
# TrainingPlanUpfrontFee, a one-off fee that is lower than the price of an hour.
_TRAINING = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9.-]+)")
_HOURS = "hrs"


def refresh_prices(region: str, path: Path, *, today: date, session: Any = None) -> Prices:
    """Fetch a region's training prices and write them to a file, whose other regions stay as they are.

    Args:
        region: The region whose prices are wanted.
        path: The file, which need not exist.
        today: The day that the prices get.
        session: A boto3 session; by default one from the environment.

    Returns:
        What the file holds now.

    Raises:
        CloudError: AWS refused, cannot be reached or has no prices for this region; the file is as it was.
        SettingsError: the file cannot be read or written.
    """
    if region.startswith("cn-"):
        raise CloudError(f"the prices of {region} are in CNY, in a price list of its own", "plan without limits.cost")
    before = read_prices(path)
    merged = merge_newest(before, fetch_prices(region, today=today, session=session))
    _write(path, dump_json(merged.to_json(), indent=1))
    return merged


def fetch_prices(region: str, *, today: date, session: Any = None) -> Prices:
    """Return a region's on-demand training prices from the AWS Price List API (pricing:GetProducts).

    Args:
        region: The region whose prices are wanted.
        today: The day that the prices get.
        session: A boto3 session; by default one from the environment.

    Raises:
        CloudError: AWS refused, cannot be reached or has no prices for this region.
    """
    found: dict[str, float] = {}
    for item in _products(session, region):
        for name, usd in _training_prices(item):
            # Two offers for one type: the dearer one, so that a ceiling on the cost holds.
            found[name] = max(usd, found.get(name, 0.0))
    if not found:
        raise CloudError(f"AWS's price list has no training prices for {region}", "check the region's name")
    source = Source(
        name=f"AWS Price List API, {_SERVICE}, usage types Train, on demand",
        url=f"https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/{_SERVICE}/current/{region}/index.json",
        date=today.isoformat(),
    )
    return Prices({region: {name: Price(usd, source) for name, usd in sorted(found.items())}})


def _products(session: Any, region: str) -> Iterator[Mapping[str, Any]]:
    """Yield every ML instance that the price list has for a region, page after page."""
    import boto3
    from botocore.config import Config

    filters = {"regionCode": region, "productFamily": _PRODUCT_FAMILY}
    with aws_errors("read the price list", _HINTS):
        config = Config(retries=client_retries())
        client = (session or boto3.Session()).client("pricing", region_name=_API_REGION, config=config)
        pages = client.get_paginator("get_products").paginate(
            ServiceCode=_SERVICE,
            Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()],
            PaginationConfig={"PageSize": _PAGE},
        )
        for page in pages:
            yield from map(_parse, page.get("PriceList") or ())


def _parse(text: str) -> Mapping[str, Any]:
    """Return one product of the price list, which comes as JSON within JSON."""
    try:
        item: dict[str, Any] = json.loads(text)
        item["product"]["attributes"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unreadable(text) from None
    return item


def _training_prices(item: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield instance type and USD per hour of a product, which is nothing unless it is training on demand."""
    usage = _TRAINING.fullmatch(str(item["product"]["attributes"].get("usagetype", "")))
    if usage is None:
        return
    try:
        for term in item.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if dimension["unit"].lower() == _HOURS and usd > 0:
                    yield usage[1], usd
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unreadable(dump_json(item)) from None


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error}", "set XDG_CONFIG_HOME to a folder of yours") from None


# ---------------------------------------------------------------- errors

_HINTS = {"AccessDeniedException": "the credentials need the permission pricing:GetProducts on *"}


def _unreadable(text: str) -> CloudError:
    return CloudError(
        f"could not read the price list: an entry is not as documented: {text[:200]}",
        "nothing was written; an endpoint that is not AWS's may have answered",
    )
