"""The command that explains why a run has failed: explain."""

from __future__ import annotations

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option, run_argument


@click.command()
@run_argument
@json_option
def explain(run: str, as_json: bool) -> int:
    """Explain why a run has failed: the first error of all hosts and ranks, its class, and what to do."""
    from cloudtrain.client.shortcuts import explain as explain_run
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console import runs as shown

    handle = get_run(run)
    found = explain_run(handle)
    if as_json:
        console.print_json(found.to_json())
    else:
        shown.print_explanation(found, handle.reference)
    return 0
