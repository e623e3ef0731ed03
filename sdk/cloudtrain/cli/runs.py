"""Commands that take a run: status, logs, list, stop."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option, log_options, run_argument
from cloudtrain.console import runs as shown
from cloudtrain.errors import CloudError

if TYPE_CHECKING:
    from cloudtrain.run import LogFilter, Status


@click.command()
@run_argument
@json_option
def status(run: str, as_json: bool) -> int:
    """Tell the truth about a run: state, reason, progress, last checkpoint, cost."""
    from cloudtrain import api

    found = api.status(run)
    if as_json:
        console.print_json(found.to_json())
    else:
        shown.print_status(found)
    return 0


@click.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--raw", is_flag=True, help="Event lines as they were written.")
@log_options
@json_option
def logs(run: str, follow: bool, raw: bool, only: LogFilter, as_json: bool) -> int:
    """Print the log of a run's hosts."""
    from cloudtrain import api
    from cloudtrain.console.logs import print_logs, print_logs_json

    handle = api.get_run(run)
    lines = handle.logs(follow=follow, only=only, on_trouble=console.say)
    if as_json:
        return print_logs_json(handle, lines, follow=follow)
    return print_logs(handle, lines, follow=follow, raw=raw)


@click.command(name="list")
@click.option("--local", "only", flag_value="local", help="Only this machine's runs.")
@click.option("--sagemaker", "only", flag_value="sagemaker", help="Only the account's runs.")
@click.option("-n", "limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many.")
@json_option
def list_(only: str | None, limit: int, as_json: bool) -> int:
    """List runs, newest first: this machine's, then the account's where settings are complete."""
    from cloudtrain import api

    runs: list[Status] = []
    if only != "sagemaker":
        runs += itertools.islice(api.list_runs(sagemaker=False), limit)
    if only != "local":
        try:
            runs += itertools.islice(api.list_runs(local=False, sagemaker=only == "sagemaker" or None), limit)
        except CloudError as error:
            if only == "sagemaker":
                raise
            console.say(f"the account's runs are not shown: {error}")
    if as_json:
        console.print_json({"runs": [status.to_json() for status in runs]})
    else:
        shown.print_runs(runs)
    return 0


@click.command()
@run_argument
@click.option("--wait/--no-wait", default=True, help="Wait until every process has ended (default).")
@json_option
def stop(run: str, wait: bool, as_json: bool) -> int:
    """End a run. A Task saves a checkpoint first; what does not end in the grace time is killed."""
    from cloudtrain import api

    handle = api.stop(run)
    found = shown.wait_for_end(handle) if wait else handle.status()
    if as_json:
        console.print_json(found.to_json())
    else:
        shown.print_status(found)
    return 0
