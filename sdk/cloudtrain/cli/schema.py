"""The command that prints the schema of job.yaml: schema."""

from __future__ import annotations

import click

from cloudtrain import console


@click.command()
@click.option("--reference", is_flag=True, help="Print the reference page (Markdown) instead.")
def schema(reference: bool) -> int:
    """Print the JSON Schema (draft 2020-12) of job.yaml, for completion and validation in an editor."""
    from cloudtrain.job.reference_page import reference_page
    from cloudtrain.job.schema import job_schema

    if reference:
        console.print_text(reference_page())
    else:
        console.print_json(job_schema())
    return 0
