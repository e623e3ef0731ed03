"""The command that fetches a run's results: download."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option, parsed_by, run_argument


def _parse_step(text: str) -> int | str:
    if text not in ("best", "last") and not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a step such as 500, best or last, got {text!r}")
    return int(text) if text.isdigit() else text


@click.command()
@run_argument
@click.option(
    "--what",
    multiple=True,
    type=click.Choice(["model", "outputs", "checkpoints"]),
    help="Only this part; may be repeated. By default all parts that exist.",
)
@click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="The folder; by default ./<run>.")
@click.option(
    "--step",
    callback=parsed_by(_parse_step),
    metavar="N|best|last",
    help="Only this checkpoint; by default all complete ones.",
)
@click.option("--unpack", is_flag=True, help="Unpack model.tar.gz and output.tar.gz, too.")
@click.option("--force", is_flag=True, help="Replace files of the folder that have other content.")
@json_option
def download(
    run: str, what: tuple[str, ...], to: Path | None, step: int | str | None, unpack: bool, force: bool, as_json: bool
) -> None:
    """Copy a run's model, outputs and checkpoints into a folder, and verify them.

    A file appears when it is complete. The same command continues an interrupted download, and leaves equal files as
    they are. `sha256sum -c SHA256SUMS` verifies the folder later.
    """
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.downloads import print_download

    with console.progress_bar("downloading") as progress:
        done = get_run(run).download(to, what=what, step=step, unpack=unpack, force=force, progress=progress)
    console.print_answer(done.to_json, lambda: print_download(done), as_json=as_json)
