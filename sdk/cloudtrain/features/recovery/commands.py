"""The command that continues a run by itself."""

from __future__ import annotations

import click

from cloudtrain.cli.completion import complete_runs  # noqa: F401
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import json_option, log_options, parse_seconds, parsed_by, run_argument
from cloudtrain.job.recover_causes import RECOVER_CAUSES, RecoverCause
from cloudtrain.runs.log_lines import LogFilter
from cloudtrain.support.units import parse_money


@click.command(
    cls=Command,
    examples={
        "cloudtrain recover 71810a": "continue it after each outside cause",
        "cloudtrain recover 71810a --attempts 10": "up to ten attempts",
    },
)
@run_argument
@click.option("--attempts", type=click.IntRange(1, 100), help="How many attempts may train.")
@click.option(
    "--cost",
    callback=parsed_by(parse_money),
    metavar="USD",
    help="Most that all attempts together may cost ('500 USD').",
)
@click.option(
    "--time",
    "seconds",
    callback=parsed_by(parse_seconds),
    metavar="TIME",
    help="Time after which no other attempt begins (14d).",
)
@click.option(
    "--on",
    "causes",
    multiple=True,
    type=click.Choice(RECOVER_CAUSES),
    help="Continue after this cause only; repeat for several.",
)
@click.option("--follow/--detach", default=False, help="Show the run until it ends, or return.")
@json_option
@log_options
def recover(
    run: str,
    attempts: int | None,
    cost: float | None,
    seconds: int | None,
    causes: tuple[RecoverCause, ...],
    follow: bool,
    as_json: bool,
    only: LogFilter,
) -> int:
    """Continue a run by itself: after an outside cause, the next attempt begins at its newest checkpoint.

    A process in the background watches the run. When it was killed, the same command starts it again, on any machine.
    All attempts have the name of the first run: status, logs, metrics, costs and stop take it.
    """
    from cloudtrain import console
    from cloudtrain.client.client import Client
    from cloudtrain.console import runs as shown
    from cloudtrain.console.plans import ConsoleObserver

    with ConsoleObserver() as observer:
        client = Client(observer=observer)
        found = client.recover(run, attempts=attempts, cost=cost, time=seconds, on=causes or None)
    if follow:
        from cloudtrain.console.follow import follow as follow_run

        return follow_run(found, job=None, only=only, as_json=as_json)
    status = found.status()
    console.print_answer(status.to_json, lambda: shown.print_status(status), as_json=as_json)
    return 0
