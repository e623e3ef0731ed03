"""The command that sums what runs have cost."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option
from cloudtrain.errors import UserError

_SOURCES = {"local": ("local",), "sandbox": ("sandbox",), "sagemaker": ("sagemaker",)}


@click.command()
@click.option(
    "--since", default="30d", show_default=True, metavar="TIME", help="Runs submitted since: 30d, 2026-11-01."
)
@click.option("--until", metavar="TIME", help="Runs submitted until; a date includes the whole day.")
@click.option(
    "--by", default="name", show_default=True, metavar="GROUP", help="name of the job, user, tag, or tag:KEY."
)
@click.option("--local", "only", flag_value="local", help="Only this machine's runs, which cost nothing.")
@click.option("--sandbox", "only", flag_value="sandbox", help="Only the sandbox's runs: what they would cost.")
@click.option("--sagemaker", "only", flag_value="sagemaker", help="Only the account's runs.")
@click.option("--billed", is_flag=True, help="Add Cost Explorer's figure. AWS bills each call (0.01 USD).")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def costs(since: str, until: str | None, by: str, only: str | None, billed: bool, as_csv: bool, as_json: bool) -> None:
    """Sum what runs and endpoints have cost, what spot saved, and what interruptions and failures lost.

    Costs are billed seconds x on-demand price, of runs by the time of the submit. Prices that are unknown are named.
    """
    from cloudtrain.client.shortcuts import costs as read_costs
    from cloudtrain.console.costs import print_costs, print_costs_csv
    from cloudtrain.support.units import parse_moment

    if as_csv and as_json:
        raise UserError("--csv and --json exclude each other", "use one of them")
    now = datetime.now(UTC)
    moments: dict[str, datetime | None] = {}
    for option, text in (("since", since), ("until", until)):
        try:
            moments[option] = None if text is None else parse_moment(text, now, is_end=option == "until")
        except ValueError as error:
            raise UserError(f"--{option}: {error}", f"for example --{option} 30d") from None
    with console.spinner("reading what was billed"):
        found = read_costs(
            since=moments["since"], until=moments["until"], by=by, backends=_SOURCES.get(only or ""), billed=billed
        )
    if as_csv:
        print_costs_csv(found)
        return
    console.print_answer(found.to_json, lambda: print_costs(found), as_json=as_json)
