"""The command that shows and refreshes prices."""

from __future__ import annotations

import functools

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option
from cloudtrain.errors import UserError, did_you_mean


@click.command()
@click.option("--region", metavar="NAME", help="AWS region (CLOUDTRAIN_REGION).")
@click.option("--refresh", is_flag=True, help="Fetch the region's prices from AWS first (pricing:GetProducts).")
@json_option
def prices(region: str | None, refresh: bool, as_json: bool) -> None:
    """Show the prices of GPU instances in a region, with their source and date."""
    from datetime import UTC, datetime

    from cloudtrain import catalog
    from cloudtrain.catalog import service_limits
    from cloudtrain.client.account import find_settings, known_prices, refresh_prices
    from cloudtrain.console.account import prices_to_json, print_prices

    region = region or find_settings().region or catalog.bundled_prices().regions[0]
    if region not in service_limits.regions() and not refresh:
        raise UserError(f"there is no AWS region {region}", did_you_mean(region, sorted(service_limits.regions())))
    today = datetime.now(UTC).date()
    known = refresh_prices(region, today=today) if refresh else known_prices()
    to_json = functools.partial(prices_to_json, known, region, today)
    console.print_answer(to_json, lambda: print_prices(known, region, today), as_json=as_json)
