"""Output of a rehearsal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cloudtrain.console import coloured, command_name, print_checks, print_message
from cloudtrain.console.terminal import unfiltered
from cloudtrain.features.rehearsal.report import Rehearsal
from cloudtrain.support.checks import PROOF_WORDS, Check, Result
from cloudtrain.support.units import format_duration

_VERDICTS = {"proven": "32", "failed": "1;31", "unknown": "33"}


@dataclass(frozen=True)
class RehearsalLines:
    """Shows a rehearsal while it runs.

    Attributes:
        progress: Shows what is done, in a few words.
        check: Shows a check when it is known, and the seconds that are left.
    """

    progress: Callable[[str], None]
    check: Callable[[Check, float], None]


@contextmanager
def rehearsal_lines() -> Iterator[RehearsalLines]:
    """Show a rehearsal on standard error: what is done with a spinner on a terminal, and each check as a line."""
    if not sys.stderr.isatty():
        yield RehearsalLines(
            lambda text: print_message(f"rehearsal: {text}"),
            lambda check, left: print_message(f"rehearsal: {_line_of(check, left)}"),
        )
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(file=unfiltered(sys.stderr), stderr=True).status("starting") as status:
        yield RehearsalLines(
            lambda text: status.update(escape(text)),
            lambda check, left: status.console.print(escape(_line_of(check, left))),
        )


def _line_of(check: Check, seconds_left: float) -> str:
    return f"{check.name} {PROOF_WORDS[check.result]}, {format_duration(round(seconds_left))} left"


def print_rehearsal(found: Rehearsal, words: str) -> None:
    """Print the checks, the verdict, and what to do next.

    Args:
        found: The result.
        words: The job as words of a command line.
    """
    print_checks(
        [(PROOF_WORDS[each.result], each.name, each.detail, ()) for each in found.checks],
        _VERDICTS,
        wraps=True,
    )
    verdict = PROOF_WORDS[found.verdict]
    print(f"verdict: {coloured(verdict, _VERDICTS[verdict])}")
    if found.verdict is Result.UNKNOWN:
        print("not everything could be shown here: see the checks that are unknown")
    for warning in found.warnings:
        print_message(f"warning: {warning}")
    if found.folder is not None:
        print(f"runs of the rehearsal: {found.folder}")
        print_message(f"their logs: {found.folder}/home/runs/*/logs")
    elif found.verdict is Result.PASS:
        print_message(f"next: {command_name()} submit {words}")
