"""The command that deletes local runs: rm."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

import click

from cloudtrain import console
from cloudtrain.cli.completion import complete_runs
from cloudtrain.cli.options import json_option, parse_seconds, parsed_by
from cloudtrain.errors import UserError
from cloudtrain.support.units import format_size


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@click.option(
    "--older-than", callback=parsed_by(parse_seconds), metavar="AGE", help="All local runs that ended before: 30d."
)
@click.option("--keep-best", is_flag=True, help="With --older-than: keep the best run of each job.")
@click.option("--yes", is_flag=True, help="Delete without a question.")
@json_option
def rm(runs: tuple[str, ...], older_than: int | None, keep_best: bool, yes: bool, as_json: bool) -> None:
    """Delete the folders of local runs: logs, checkpoints and models. Shows them with their sizes and asks.

    Active runs are refused, and runs whose checkpoints another run names. Files in S3 and jobs on SageMaker are never
    deleted.
    """
    from cloudtrain.client import removal
    from cloudtrain.client.client import Client

    if bool(runs) == (older_than is not None):
        raise click.UsageError("give runs, or --older-than: cloudtrain rm RUN, cloudtrain rm --older-than 30d")
    if keep_best and older_than is None:
        raise click.UsageError("--keep-best needs --older-than, such as --older-than 30d")
    with console.spinner("looking for runs"):
        if older_than is None:
            found = removal.select_named(Client(), runs)
        else:
            before = datetime.now(UTC) - timedelta(seconds=older_than)
            found = removal.select_older(Client(), before, keep_best=keep_best)
        sizes = {status.reference: removal.folder_bytes(removal.folder_of(status)) for status in found.runs}
    total = f"{len(sizes)} run{'' if len(sizes) == 1 else 's'}, {format_size(sum(sizes.values()))}"
    if not as_json:
        rows = [(each.reference, str(each.state), format_size(sizes[each.reference])) for each in found.runs]
        rows += [(f"local:{run}", "kept", reason) for run, reason in found.kept.items()]
        console.print_columns([("run", "state", "size"), *rows] if rows else [("no run matches",)])
    if sizes and not yes:
        _confirm(total)
    for status in found.runs:
        removal.delete_folder(removal.folder_of(status))
    if as_json:
        removed = [{"run": run, "bytes": size} for run, size in sizes.items()]
        kept = [{"run": f"local:{run}", "reason": reason} for run, reason in found.kept.items()]
        console.print_json({"removed": removed, "kept": kept})
    elif sizes:
        console.print_message(f"deleted {total}")


def _confirm(total: str) -> None:
    """Ask whether to delete the runs.

    Raises:
        UserError: There is no terminal, or the answer is no.
    """
    hint = "to delete without a question: --yes"
    if not sys.stdin.isatty():
        raise UserError(f"there is no terminal to ask whether to delete {total}; nothing was deleted", hint)
    if not click.confirm(f"Delete {total}?", default=False, err=True):
        raise UserError("nothing was deleted", hint)
