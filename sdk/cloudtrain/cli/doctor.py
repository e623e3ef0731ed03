"""The command that checks this machine: doctor."""

from __future__ import annotations

import functools

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option
from cloudtrain.errors import EXIT_USER


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: Python, torch, GPUs, disk space, and what is configured for SageMaker.

    Exits 0 if local runs are possible, else 2. What only SageMaker needs is a note. No network call is made;
    `cloudtrain check` asks the account.
    """
    from cloudtrain.client.machine_report import check_machine, is_ready, report_to_json
    from cloudtrain.console.account import print_machine_checks

    with console.spinner("checking this machine"):
        checks = check_machine()
    ready = is_ready(checks)
    show = functools.partial(print_machine_checks, checks, is_ready=ready)
    console.print_answer(lambda: report_to_json(checks), show, as_json=as_json)
    return 0 if ready else EXIT_USER
