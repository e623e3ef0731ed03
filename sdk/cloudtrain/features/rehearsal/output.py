"""Output of a rehearsal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape

from cloudtrain.client.observer import Observer
from cloudtrain.console import coloured, command_name, print_checks, print_message
from cloudtrain.console.terminal import unfiltered
from cloudtrain.features.rehearsal.report import Rehearsal
from cloudtrain.support.checks import PROOF_WORDS, Check, Result
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from rich.status import Status as RichStatus

_VERDICTS = {"proven": "32", "failed": "1;31", "unknown": "33"}


class _Lines(Observer):
    """Prints a line for what is done, and one for each check."""

    def on_progress(self, text: str) -> None:
        print_message(f"rehearsal: {text}")

    def on_check(self, check: Check, seconds_left: float) -> None:
        print_message(f"rehearsal: {_line_of(check, seconds_left)}")


class _Spinner(Observer):
    """Shows what is done beside a spinner, and each check as a line above it."""

    def __init__(self, status: RichStatus) -> None:
        self._status = status

    def on_progress(self, text: str) -> None:
        self._status.update(escape(text))

    def on_check(self, check: Check, seconds_left: float) -> None:
        self._status.console.print(escape(_line_of(check, seconds_left)))


@contextmanager
def rehearsal_lines() -> Iterator[Observer]:
    """Return what shows a rehearsal on standard error: with a spinner on a terminal, else as lines."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console

    with Console(file=unfiltered(sys.stderr), stderr=True).status("starting") as status:
        yield _Spinner(status)


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
