"""Output of a rehearsal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cloudtrain.client.observer import Observer
from cloudtrain.console import coloured, command_name, print_checks, print_message
from cloudtrain.console.cells import wrapped
from cloudtrain.console.terminal import can_show, columns_of, is_terminal, strip_escapes
from cloudtrain.console.waiting import LONG_SECONDS, waiting
from cloudtrain.features.rehearsal.report import Rehearsal
from cloudtrain.support.checks import PROOF_WORDS, Check, Result
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.console.waiting import Waiting

_VERDICTS = {"proven": "32", "failed": "1;31", "unknown": "33"}
_SIGNS = {"proven": "✓", "failed": "✗", "unknown": "?"}
_NAME_COLUMNS = 9
_TIME_COLUMNS = 6


class RehearsalObserver(Observer):
    """Shows what is done while it is done, and each check when it is known. Equal checks are shown once.

    Args:
        wait: Shows what is done.
    """

    def __init__(self, wait: Waiting) -> None:
        self._wait = wait
        self._shown = set[Check]()
        self._last = time.monotonic()

    def on_progress(self, text: str) -> None:
        """Begin a phase."""
        self._wait.begin(self._named(text), is_long=True)

    def on_detail(self, text: str) -> None:
        """Show how far the phase is."""
        self._wait.show(text)

    def on_check(self, check: Check, seconds_left: float) -> None:
        """Print a check, and the time since the last one."""
        if check in self._shown:
            return
        self._shown.add(check)
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        self._print(check, seconds, seconds_left)

    def _named(self, text: str) -> str:
        return f"rehearsal: {text}"

    def _print(self, check: Check, seconds: float, seconds_left: float) -> None:
        left = format_duration(round(seconds_left))
        took = format_duration(round(seconds))
        word = PROOF_WORDS[check.result]
        print_message(f"rehearsal: {check.name} {word} in {took}, {left} left")


class _TerminalObserver(RehearsalObserver):
    """Prints each check with its details, and each long phase that ends without a check."""

    _phase = ""

    def on_progress(self, text: str) -> None:
        """Begin a phase."""
        self._end_phase()
        self._phase = text
        super().on_progress(text)

    def _end_phase(self) -> None:
        seconds = self._wait.seconds
        if self._phase and seconds >= LONG_SECONDS:
            took = format_duration(round(seconds))
            indent = " " * (len(_sign("proven")) + _NAME_COLUMNS + 1)
            print_message(f"{indent} {took:>{_TIME_COLUMNS}}  {self._phase}")
            self._last = time.monotonic()

    def _named(self, text: str) -> str:
        return text

    def _print(self, check: Check, seconds: float, seconds_left: float) -> None:
        del seconds_left
        # The time of the phase is that of the check.
        self._phase = ""
        for line in check_lines(check, seconds):
            print_message(line)


@contextmanager
def rehearsal_observer() -> Iterator[RehearsalObserver]:
    """Return what shows a rehearsal on standard error."""
    is_live = is_terminal(sys.stderr)
    with waiting("planning the rehearsal") as wait:
        yield _TerminalObserver(wait) if is_live else RehearsalObserver(wait)


def check_lines(check: Check, seconds: float) -> list[str]:
    """Return the lines of a check for a terminal: sign, name, time, and the details below each other."""
    word = PROOF_WORDS[check.result]
    sign = coloured(_sign(word), _VERDICTS[word], sys.stderr)
    took = ""
    if seconds >= 1:
        took = format_duration(round(seconds))
    indent = " " * (len(_sign(word)) + _NAME_COLUMNS + _TIME_COLUMNS + 4)
    room = max(20, columns_of(sys.stderr) - len(indent))
    first, *rest = wrapped(strip_escapes(check.detail), room)
    beginning = f"{sign} {check.name:<{_NAME_COLUMNS}} {took:>{_TIME_COLUMNS}}"
    return [f"{beginning}  {first}".rstrip(), *(f"{indent}{line}" for line in rest)]


def _sign(word: str) -> str:
    """Return the sign of a result, or its word where the encoding lacks it."""
    sign = _SIGNS[word]
    return sign if can_show(sign, sys.stderr) else f"{word:<7}"


def shows_checks_at_once() -> bool:
    """Return whether a user has seen all checks with their details when the rehearsal ends."""
    return is_terminal(sys.stderr) and is_terminal(sys.stdout)


def print_rehearsal(found: Rehearsal, words: str, *, are_shown: bool = False) -> None:
    """Print the checks, the verdict, and what to do next.

    Args:
        found: The result.
        words: The job as words of a command line.
        are_shown: Whether the checks were printed when they were known.
    """
    if not are_shown:
        rows = [(PROOF_WORDS[each.result], each.name, each.detail, ()) for each in found.checks]
        # Several phases may have the same warning.
        print_checks(list(dict.fromkeys(rows)), _VERDICTS, wraps=True)
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
