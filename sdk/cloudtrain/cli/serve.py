"""The command that serves a model on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option, option_group, parse_step, parsed_by, run_argument


def _build(**values: object) -> object:
    from cloudtrain.serving.package import ServingOptions

    return ServingOptions(**values)  # type: ignore[arg-type]


serving_options = option_group(
    "options",
    _build,
    click.option(
        "--checkpoint",
        callback=parsed_by(parse_step("best")),
        metavar="STEP|best",
        help="Weights of a checkpoint; by default those that the run exported.",
    ),
    click.option(
        "--max-batch",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        metavar="N",
        help="Most samples that the model gets at once.",
    ),
    click.option(
        "--batch-wait",
        "batch_wait_seconds",
        type=click.FloatRange(0, 10),
        default=0.0,
        show_default=True,
        metavar="SECONDS",
        help="How long a request waits for others.",
    ),
    click.option(
        "--replicas",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        metavar="N",
        help="Processes with the model.",
    ),
    click.option(
        "--gpus",
        type=click.FloatRange(0, 16),
        default=0.0,
        show_default=True,
        metavar="N",
        help="GPUs of a replica; 0.5 shares one between two.",
    ),
)
"""Adds the options of a served model; the command gets `ServingOptions` as `options`."""


@click.command()
@run_argument
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port on 127.0.0.1; by default a free one.")
@serving_options
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File for the server's log; by default a temporary one.",
)
@json_option
def serve(run: str, port: int | None, options: object, log: Path | None, as_json: bool) -> int:
    """Serve a run's model on this machine: GET /ping and POST /invocations, as a SageMaker endpoint does.

    The server is Ray Serve, which `pip install 'cloudtrain[serve]'` installs. It listens on 127.0.0.1 only. With --json
    the first line is {"url": ...}. Ctrl-C ends it.
    """
    from cloudtrain.serving import served_run

    with served_run.ended_by_signals(), console.spinner("loading the model"):
        server = served_run.serve(run, options=options, port=port, log=log)  # type: ignore[arg-type]
    with server:
        console.print_answer(lambda: {"url": server.url}, lambda: console.print_text(server.url), as_json=as_json)
        return served_run.wait_for_end(server)
