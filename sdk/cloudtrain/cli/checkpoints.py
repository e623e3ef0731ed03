"""Commands about checkpoints: list, verify and export."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from cloudtrain import console
from cloudtrain.cli.completion import complete_runs
from cloudtrain.cli.examples import Group
from cloudtrain.cli.options import json_option, read_run_argument, refuse_misspelt, run_argument
from cloudtrain.errors import EXIT_RUN_FAILED

_LIST = "list"


class _DefaultListGroup(Group):
    """A command group in which `checkpoints RUN` means `checkpoints list RUN`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the command to the front, or insert `list`."""
        named = next((word for word in args if not word.startswith("-")), None)
        asks_for_help = bool(args) and args[0] in ctx.help_option_names
        if named is not None and named in self.commands:
            args = [named, *(word for word in args if word != named)]
        elif not asks_for_help and (args or not ctx.resilient_parsing):
            # Without a word, completion offers the commands.
            # A run and another word: probably a misspelt command.
            if sum(not word.startswith("-") for word in args) > 1:
                refuse_misspelt(ctx, args[0], self.commands)
            args = [_LIST, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands, options and runs that begin with a text."""
        return [*super().shell_complete(ctx, incomplete), *complete_runs(ctx, None, incomplete)]


@click.group(
    cls=_DefaultListGroup,
    name="checkpoints",
    no_args_is_help=False,
    examples={
        "cloudtrain checkpoints 71810a": "list them",
        "cloudtrain checkpoints verify 71810a": "read and compare them",
        "cloudtrain checkpoints export 71810a --to safetensors": "one file of weights",
    },
)
def checkpoints() -> None:
    """List the checkpoints of a run, newest first; verify or export them.

    RUN is a run on this machine, on Slurm, in the sandbox or on SageMaker, or a folder or s3:// uri with checkpoints; by
    default the newest local run, except for export.

    Without a command: list.
    """


@checkpoints.command(
    name=_LIST,
    examples={
        "cloudtrain checkpoints": "the newest local run",
        "cloudtrain checkpoints list s3://team/checkpoints": "a folder in S3",
    },
)
@read_run_argument
@json_option
def list_(run: str, as_json: bool) -> None:
    """List a run's checkpoints, newest first, and whether each is complete or damaged."""
    from cloudtrain.client.shortcuts import checkpoint_folder
    from cloudtrain.console import checkpoints as shown

    with console.spinner("looking for checkpoints"):
        folder = checkpoint_folder(run)
        found = folder.list()
    content = {"checkpoints": [each.to_json() for each in found]}
    console.print_answer(
        lambda: content, lambda: shown.print_checkpoints(found, folder), as_json=as_json
    )


@checkpoints.command(
    examples={
        "cloudtrain checkpoints verify": "all of the newest local run",
        "cloudtrain checkpoints verify 71810a --step 500": "one of them",
    },
)
@read_run_argument
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the checkpoints of this step; by default all.",
)
@json_option
def verify(run: str, step: int | None, as_json: bool) -> int:
    """Verify the checksums of a run's checkpoints, and that PyTorch can read them. Change nothing.

    The exit code is 4 when a checkpoint is damaged, or the installed PyTorch cannot read it.
    """
    from cloudtrain.client.shortcuts import checkpoint_folder
    from cloudtrain.console import checkpoints as shown
    from cloudtrain_runtime.contract.saved_checkpoint import DAMAGED, UNREADABLE

    with console.progress_bar("reading") as progress:
        found = checkpoint_folder(run).verify(step, progress)
    content = {"checkpoints": [each.to_json() for each in found]}
    console.print_answer(lambda: content, lambda: shown.print_verified(found), as_json=as_json)
    is_bad = any(each.state in (DAMAGED, UNREADABLE) for each in found)
    return EXIT_RUN_FAILED if is_bad else 0


@checkpoints.command(
    examples={
        "cloudtrain checkpoints export 71810a --to safetensors": "the newest",
        "cloudtrain checkpoints export 71810a --to torch --step 500": "of step 500",
    },
)
@run_argument
@click.option(
    "--to",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    required=True,
    help="Format of the file.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Step of the checkpoint; the newest by default.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The file; by default ./<run>-<step>.",
)
@click.option(
    "--part",
    type=click.Choice(["model", "all"]),
    default="model",
    show_default=True,
    help="The weights, or the whole state.",
)
@json_option
def export(
    run: str, form: str, step: int | None, output: Path | None, part: str, as_json: bool
) -> None:
    """Write the weights of a checkpoint to one file, for any number of ranks that saved it."""
    from cloudtrain.client.shortcuts import checkpoint_folder
    from cloudtrain.console import checkpoints as shown

    with console.spinner("exporting"):
        done = checkpoint_folder(run).export(form, step=step, target=output, part=part)
    console.print_answer(done.to_json, lambda: shown.print_exported(done), as_json=as_json)
