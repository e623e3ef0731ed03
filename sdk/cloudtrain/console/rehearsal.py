"""Output of a rehearsal: a table of its checks and the verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cloudtrain.console import command_name, print_message
from cloudtrain.console.terminal import unfiltered

if TYPE_CHECKING:
    from rich.console import Console

    from cloudtrain.rehearsal.report import Rehearsal

_STYLES = {"proven": "green", "failed": "bold red", "unknown": "yellow"}


@contextmanager
def progress_lines() -> Iterator[Callable[[str], None]]:
    """Return a callback that shows what is done: with a spinner on a terminal, else as lines on standard error."""
    if not sys.stderr.isatty():
        yield lambda text: print_message(f"rehearsal: {text}")
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(file=unfiltered(sys.stderr), stderr=True).status("starting") as status:
        yield lambda text: status.update(escape(text))


def print_rehearsal(found: Rehearsal, words: str) -> None:
    """Print the checks, the verdict, and what to do next.

    Args:
        found: The result.
        words: The job as words of a command line.
    """
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    _print_checks(found, out)
    out.print(Text.assemble("verdict: ", (found.verdict, _STYLES[found.verdict])))
    if found.verdict == "unknown":
        out.print("not everything could be shown here: see the checks that are unknown", soft_wrap=True)
    for warning in found.warnings:
        print_message(f"warning: {warning}")
    if found.folder is not None:
        out.print(Text(f"runs of the rehearsal: {found.folder}"), soft_wrap=True)
        print_message(f"their logs: {found.folder}/home/runs/*/logs")
    elif found.verdict == "proven":
        print_message(f"next: {command_name()} submit {words}")


def _print_checks(found: Rehearsal, out: Console) -> None:
    """Print one check per line; on a terminal, long details continue below their beginning."""
    from rich.table import Table
    from rich.text import Text

    if sys.stdout.isatty():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for check in found.checks:
            table.add_row(Text(check.result, _STYLES[check.result]), Text(check.name), Text(check.detail))
        out.print(table)
        return
    width, longest = max((len(check.name) for check in found.checks), default=0), max(map(len, _STYLES))
    for check in found.checks:
        result = (f"{check.result:<{longest}}", _STYLES[check.result])
        out.print(Text.assemble(result, f"  {check.name:<{width}}  {check.detail}"), soft_wrap=True)
