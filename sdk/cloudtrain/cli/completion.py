"""`cloudtrain completion`, and what the shell completes: runs, and fields of the job. No backend is asked."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
)

from cloudtrain import console

_SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}
_ADD_IN_BASH = "COMPREPLY+=($value)"


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, runs, files and fields of the job in a shell.

    \b
    bash  add to ~/.bashrc:                    eval "$(cloudtrain completion bash)"
    zsh   add to ~/.zshrc, after compinit:     eval "$(cloudtrain completion zsh)"
    fish  add to ~/.config/fish/config.fish:   cloudtrain completion fish | source

    Runs are those that this machine knows: local runs, and the runs that it has submitted.
    """  # noqa: D301 (click's mark for lines that stay as they are)
    root = click.get_current_context().find_root().command
    script = _SHELLS[shell](root, {}, "cloudtrain", "_CLOUDTRAIN_COMPLETE").source()
    # A value follows the field of --set without a space.
    no_space = f"{_ADD_IN_BASH}; [[ $value != *= ]] || compopt -o nospace"
    console.print_text(script.replace(_ADD_IN_BASH, no_space))


def complete_runs(
    _: click.Context, __: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Return the names and ids of known runs that begin with a text, the newest first."""
    from cloudtrain.client.home import all_homes
    from cloudtrain.errors import UserError
    from cloudtrain.runs.known_runs import LATEST, job_name, known_runs

    try:
        homes = all_homes()
    except UserError:  # the command itself will say it
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
    fields = [
        path for path in paths if path not in sections or "." in path
    ]  # spot: true is short for a section
    return [
        CompletionItem(f"{path}=")
        for path in fields
        if path.startswith(incomplete) and "<name>" not in path
    ]
