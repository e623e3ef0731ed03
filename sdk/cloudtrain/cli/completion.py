"""What the shell completes: runs, and fields of the job. No backend is asked."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem


def complete_runs(
    _: click.Context, __: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Return the names and ids of known runs that begin with a text, the newest first."""
    from cloudtrain.client.home import all_homes
    from cloudtrain.errors import UserError
    from cloudtrain.runs.known_runs import LATEST, job_name, known_runs

    try:
        homes = all_homes()
    except UserError:
        # The command itself reports it.
        return []
    ids = [run.rpartition(":")[2] for run in known_runs(os.environ, homes)]
    names = dict.fromkeys([LATEST, *map(job_name, ids), *ids])
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_fields(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the paths of the fields of job.yaml that begin with a text, each with `=`."""
    from cloudtrain.job.fields import sections_of
    from cloudtrain.job.spec import JobSpec

    sections = dict(sections_of(JobSpec))
    paths = [
        f"{path}.{name}" if path else name
        for path, model in sections.items()
        for name in model.model_fields
    ]
    # A section such as `cluster.spot` is kept: `spot: true` is short for it.
    fields = [path for path in paths if path not in sections or "." in path]
    return [
        CompletionItem(f"{path}=")
        for path in fields
        if path.startswith(incomplete) and "<name>" not in path
    ]
