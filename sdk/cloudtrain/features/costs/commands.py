"""Commands about money: costs and prices."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

import click
from click.core import ParameterSource

from cloudtrain import console
from cloudtrain.cli.completion import complete_runs
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import (
    check_one_selection,
    json_option,
    listed_backend_option,
    read_moment,
)
from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.support.backend_facts import DEFAULT_BACKEND, MACHINE_BACKEND, SIMULATED_BACKEND


@click.command(
    cls=Command,
    examples={
        "cloudtrain costs --by user --since 7d": "of a week, by user",
        "cloudtrain costs --by tag:team --csv > costs.csv": "by a tag, as a table",
        "cloudtrain costs 71810a": "where the time of a run went",
    },
)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=complete_runs)
@click.option(
    "--since",
    default="30d",
    show_default=True,
    metavar="TIME",
    help="Runs submitted since: 30d, 2026-11-01.",
)
@click.option(
    "--until", metavar="TIME", help="Runs submitted until; a date includes the whole day."
)
@click.option(
    "--by",
    default="name",
    show_default=True,
    metavar="GROUP",
    help="name of the job, user, tag, or tag:KEY.",
)
@click.option(
    "--local",
    "only",
    flag_value=MACHINE_BACKEND,
    help="Only this machine's runs, which cost nothing.",
)
@click.option(
    "--sandbox",
    "only",
    flag_value=SIMULATED_BACKEND,
    help="Only the sandbox's runs: what they would cost.",
)
@click.option("--sagemaker", "only", flag_value=DEFAULT_BACKEND, help="Only the account's runs.")
@listed_backend_option
@click.option(
    "--billed", is_flag=True, help="Add Cost Explorer's figure. AWS bills each call (0.01 USD)."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
@click.pass_context
def costs(
    context: click.Context,
    run: str | None,
    since: str,
    until: str | None,
    by: str,
    only: str | None,
    backend: str | None,
    billed: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Sum what runs and endpoints have cost, what spot saved, and what interruptions and failures lost.

    Costs are billed seconds x on-demand price, of runs by the time of the submit. Prices that are unknown are named.
    A run on Slurm costs its time on the nodes x the site's usd_per_node_hour.

    With RUN: what its paid time was spent for, such as start, training, repeated work and idle time.
    """
    if run is not None:
        _show_ledger(context, run, as_json=as_json)
        return
    from cloudtrain.features.costs.output import print_costs, print_costs_csv
    from cloudtrain.features.costs.reading import costs as read_costs

    if as_csv and as_json:
        raise UserError("--csv and --json exclude each other", "use one of them")
    check_one_selection(only, backend)
    start = read_moment("--since", since)
    end = read_moment("--until", until, is_end=True)
    with console.spinner("reading what was billed"):
        found = read_costs(since=start, until=end, by=by, backend=backend or only, billed=billed)
    if as_csv:
        print_costs_csv(found)
        return
    console.print_answer(found.to_json, lambda: print_costs(found), as_json=as_json)


def _show_ledger(context: click.Context, name: str, *, as_json: bool) -> None:
    """Show where the time and the money of one run went. The options that select runs have no meaning there."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.features.costs.ledger_output import print_ledger
    from cloudtrain.runs.ledger_advice import advise
    from cloudtrain.runs.ledger_reading import read_ledger
    from cloudtrain.runs.ledger_words import ledger_json

    given = [
        each.opts[0]
        for each in context.command.params
        if each.name not in (None, "run", "as_json")
        and context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UserError(
            f"{given[0]} selects the runs of a sum, and {name} is one run",
            f"cloudtrain costs {name}, or without it: cloudtrain costs {given[0]} ...",
        )
    run = get_run(name)
    with console.spinner("reading what was billed"):
        found = read_ledger(run, run.status())
        advice = advise(found, run.facts())
    console.print_answer(
        lambda: ledger_json(found, advice), lambda: print_ledger(found, advice), as_json=as_json
    )


@click.command(
    cls=Command,
    examples={
        "cloudtrain prices --region eu-west-1": "another region",
        "cloudtrain prices --refresh": "fetch them from AWS first",
    },
)
@click.option("--region", metavar="NAME", help="AWS region (CLOUDTRAIN_REGION).")
@click.option(
    "--refresh",
    is_flag=True,
    help="Fetch the prices from AWS (pricing:GetProducts).",
)
@json_option
def prices(region: str | None, refresh: bool, as_json: bool) -> None:
    """Show the prices of GPU instances in a region, with their source and date."""
    from cloudtrain import catalog
    from cloudtrain.catalog import service_limits
    from cloudtrain.client.account import find_settings, known_prices, refresh_prices
    from cloudtrain.features.costs.output import prices_to_json, print_prices

    region = region or find_settings().region or catalog.bundled_prices().regions[0]
    if region not in service_limits.regions() and not refresh:
        raise UserError(
            f"there is no AWS region {region}",
            did_you_mean(region, sorted(service_limits.regions())),
        )
    today = datetime.now(UTC).date()
    known = refresh_prices(region, today=today) if refresh else known_prices()
    to_json = functools.partial(prices_to_json, known, region, today)
    console.print_answer(to_json, lambda: print_prices(known, region, today), as_json=as_json)
