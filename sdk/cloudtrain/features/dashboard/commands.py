"""Commands that show runs as pages: dashboard, report, card."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import json_option, read_run_argument, runs_argument
from cloudtrain.errors import UserError


@click.command(
    cls=Command,
    examples={
        "cloudtrain dashboard --open": "open it in the browser",
        "cloudtrain dashboard --port 8787": "at a fixed port, for an SSH tunnel",
    },
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port on this machine; 0 is a free one.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name of a proxy. May be repeated.",
)
@click.option(
    "--root-path", default="", metavar="PATH", help="Prefix of a proxy that does not remove it."
)
@json_option
def dashboard(
    port: int | None, opens: bool, hosts: tuple[str, ...], root_path: str, as_json: bool
) -> None:
    """Show runs in the browser, live: of this machine, the sandbox and the account. Ctrl-C ends it.

    The page is served on 127.0.0.1 only, and the printed address contains a token. From another machine:
    ssh -L 8787:127.0.0.1:8787 HOST. Behind Jupyter's proxy: --allowed-host with the name of the Jupyter server.
    """
    from cloudtrain.features.dashboard.server import Dashboard

    server = Dashboard(port, allowed_hosts=hosts, root_path=root_path)
    console.print_answer(
        lambda: {"url": server.url}, lambda: console.print_text(server.url), as_json=as_json
    )
    if not opens:
        server.serve()
        return
    from cloudtrain.features.dashboard.browser import opened_page

    with opened_page(server.url):
        server.serve()


@click.command(
    cls=Command,
    examples={
        "cloudtrain report 71810a": "write <run>.html",
        "cloudtrain report 71810a 7bec7f -o runs.html": "two runs on one page",
    },
)
@runs_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Default: <run>.html.",
)
@click.option("--watch", is_flag=True, help="Write it again until all runs have ended.")
@json_option
def report(runs: tuple[str, ...], output: Path | None, watch: bool, as_json: bool) -> None:
    """Write the page of runs, with curves, plan, failure and log, into one HTML file that needs no server."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.features.dashboard.report import watch_report, write_report

    handles = [get_run(run) for run in runs]
    name = f"{handles[0].id}.html" if len(handles) == 1 else "cloudtrain-report.html"
    path = output or Path(name)
    with console.spinner("reading the logs"):
        size = write_report(handles, path)
    if watch:
        size = watch_report(handles, path, console.print_message)
    console.print_answer(
        lambda: {"path": str(path), "bytes": size},
        lambda: console.print_text(str(path)),
        as_json=as_json,
    )


@click.command(
    cls=Command,
    examples={
        "cloudtrain card": "of the newest local run",
        "cloudtrain card 71810a -o MODEL.md": "into a file",
    },
)
@read_run_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write it into a new file.",
)
@json_option
def card(run: str, output: Path | None, as_json: bool) -> None:
    """Print the model card of a run, in Markdown with the metadata of Hugging Face: data, code, job, metrics, cost."""
    from cloudtrain.features.dashboard.model_cards import model_card
    from cloudtrain.support.atomic_write import write_atomically

    if output is not None and output.exists():
        raise UserError(f"{output} exists already", "give another name, or delete it")
    with console.spinner("reading the run"):
        text = model_card(run)
    if output is None:
        console.print_answer(
            lambda: {"card": text}, lambda: console.print_text(text), as_json=as_json
        )
        return
    try:
        write_atomically(output, text)
    except OSError as error:
        raise UserError(
            f"{output}: cannot be written: {error.strerror}", "choose another file: -o FILE"
        ) from None
    found = {"path": str(output), "card": text}
    console.print_answer(lambda: found, lambda: console.print_text(str(output)), as_json=as_json)
