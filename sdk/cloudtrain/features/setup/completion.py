"""`cloudtrain completion`: the script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from cloudtrain import console
from cloudtrain.cli.examples import Command

_SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}
_ADD_IN_BASH = "COMPREPLY+=($value)"


@click.command(
    cls=Command,
    examples={
        "cloudtrain completion bash >> ~/.bashrc": "in every new bash",
        "cloudtrain completion fish | source": "in this fish",
    },
)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, runs, files and fields of the job in a shell.

    \b
    file                          line to add
    ~/.bashrc                     eval "$(cloudtrain completion bash)"
    ~/.zshrc, after compinit      eval "$(cloudtrain completion zsh)"
    ~/.config/fish/config.fish    cloudtrain completion fish | source

    Runs are those that this machine knows: local runs, and the runs that it has submitted.
    """  # noqa: D301 (click's mark for lines that stay as they are)
    root = click.get_current_context().find_root().command
    script = _SHELLS[shell](root, {}, "cloudtrain", "_CLOUDTRAIN_COMPLETE").source()
    # A value follows the field of --set without a space.
    no_space = f"{_ADD_IN_BASH}; [[ $value != *= ]] || compopt -o nospace"
    console.print_text(script.replace(_ADD_IN_BASH, no_space))
