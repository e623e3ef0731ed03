"""`cloudtrain compare`."""

from __future__ import annotations

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import json_option, runs_argument


@click.command(
    cls=Command,
    examples={
        "cloudtrain compare 71810a 7bec7f": "two runs",
        "cloudtrain compare 71810a 7bec7f --json": "for a script",
    },
)
@runs_argument
@json_option
def compare(runs: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: the settings in which they differ, and the last and best values of their metrics."""
    from cloudtrain.client import shortcuts
    from cloudtrain.console.metrics import print_comparison

    with console.spinner("reading the logs"):
        found = shortcuts.compare(runs)
    console.print_answer(found.to_json, lambda: print_comparison(found), as_json=as_json)
