"""Output of a rehearsal: a table of its checks and the verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cloudtrain.console import command_name, print_message
from cloudtrain.console.terminal import unfiltered

if TYPE_CHECKING:
    from cloudtrain.rehearsal.report import Rehearsal

_WORDS = {
    "proven": ("proven", "green"),
    "failed": ("failed", "bold red"),
    "unknown": ("cannot be shown here", "yellow"),
}
_WIDTH = max(len(word) for word, _ in _WORDS.values())


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
    """Print the checks, one per line, the verdict, and what to do next.

    Args:
        found: The result.
        words: The job as words of a command line.
    """
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    width = max((len(check.name) for check in found.checks), default=0)
    for check in found.checks:
        word, style = _WORDS[check.result]
        out.print(
            Text.assemble((f"{word:<{_WIDTH}}", style), f"  {check.name:<{width}}  {check.detail}"), soft_wrap=True
        )
    word, style = _WORDS[found.verdict]
    out.print(Text.assemble("verdict: ", (word, style)), soft_wrap=True)
    for warning in found.warnings:
        print_message(f"warning: {warning}")
    if found.folder is not None:
        out.print(Text(f"runs of the rehearsal: {found.folder}"), soft_wrap=True)
        print_message(f"their logs: {found.folder}/home/runs/*/logs")
    elif found.verdict == "proven":
        print_message(f"next: {command_name()} submit {words}")
