"""`cloudtrain metrics`: the history of a run's metrics."""

from __future__ import annotations

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option, run_argument


@click.command()
@run_argument
@click.argument("names", nargs=-1, metavar="[METRIC]...")
@click.option("--all", "show_all", is_flag=True, help="Print every step and every metric.")
@json_option
def metrics(run: str, names: tuple[str, ...], show_all: bool, as_json: bool) -> int:
    """Print the values of a run's metrics by step.

    METRIC is a name such as train/loss, or loss for all splits. A terminal shows as many steps as fit, without the
    metrics of the training's speed, unless they are named.
    """
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.metrics import print_history
    from cloudtrain.runs.history import read_history

    handle = get_run(run)
    with console.spinner("reading the log"):
        history = read_history(handle)
    if names or not as_json:
        history = history.only(history.select(names) if names or not show_all else tuple(history.metrics))
    if as_json:
        console.print_json(history.to_json(handle.id))
    else:
        unmatched = () if history.metrics else handle.status().progress.unmatched
        print_history(history, show_all=show_all, unmatched=unmatched)
    return 0
