"""Output of a rehearsal: a table of its checks and the verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cloudtrain.console import coloured, command_name, print_checks, print_message
from cloudtrain.console.terminal import unfiltered

if TYPE_CHECKING:
    from cloudtrain.rehearsal.report import Rehearsal

_COLOURS = {"proven": "32", "failed": "1;31", "unknown": "33"}


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
    print_checks([(each.result, each.name, each.detail, ()) for each in found.checks], _COLOURS, wraps=True)
    print(f"verdict: {coloured(found.verdict, _COLOURS[found.verdict])}")
    if found.verdict == "unknown":
        print("not everything could be shown here: see the checks that are unknown")
    for warning in found.warnings:
        print_message(f"warning: {warning}")
    if found.folder is not None:
        print(f"runs of the rehearsal: {found.folder}")
        print_message(f"their logs: {found.folder}/home/runs/*/logs")
    elif found.verdict == "proven":
        print_message(f"next: {command_name()} submit {words}")
