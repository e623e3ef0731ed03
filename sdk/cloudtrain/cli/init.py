"""The command that writes a new job: init."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.options import json_option
from cloudtrain.client.new_job import TEMPLATES, create_job


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=".")
@click.option("--template", type=click.Choice(TEMPLATES), help="Kind of job; asked on a terminal, otherwise task.")
@json_option
def init(folder: Path, template: str | None, as_json: bool) -> None:
    """Write a new job into DIR, by default the working folder: job.yaml, code, README, ignore file and schema.

    It runs at once: cloudtrain submit job.yaml --local. Existing files are never changed.

    \b
    task         model, data and loss; cloudtrain trains it
    script       a training loop of its own under torchrun
    lightning    a script with Lightning's Trainer
    accelerate   a script with a loop of Accelerate
    huggingface  a script with a Trainer of Transformers
    """  # noqa: D301 (click's mark for lines that stay as they are)
    if template is None and sys.stdin.isatty() and not as_json:
        template = click.prompt("template", type=click.Choice(TEMPLATES), default=TEMPLATES[0], err=True)
    written = create_job(folder, template=template or TEMPLATES[0])
    console.print_answer(written.to_json, lambda: _print(folder, written.files), as_json=as_json)


def _print(folder: Path, files: tuple[str, ...]) -> None:
    for name in files:
        console.print_text(str(folder / name))
    console.print_message(f"to run it here: {console.command_name()} submit {folder / 'job.yaml'} --local --follow")
