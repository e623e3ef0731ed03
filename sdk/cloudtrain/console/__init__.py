"""Output of the command line: text for users, JSON for programs.

Only this package and `cli` print. With `--json`, standard output gets one JSON object and all text goes to standard
error. This module holds what every command needs; the other modules hold the output of one topic each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cloudtrain.console.cells import cell_count, pad, wrapped
from cloudtrain.console.terminal import (
    columns_of,
    is_terminal,
    strip_unsafe_escapes,
    terminal_width,
    unfiltered,
)
from cloudtrain.errors import CloudtrainError, SettingsError, SpecError, UntrustedHomeError
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from cloudtrain.errors import UntrustedSettingsError

_STARTED = time.time()
BOLD = "1"
DIM = "2"
RED = "31"
YELLOW = "33"
CYAN = "36"
"""ANSI codes of `coloured`."""

_SHORT_MESSAGE = 40
"""Characters of a text that fits every terminal."""

PROGRESS_DELAY_SECONDS = 1.0
"""Time after which a progress bar appears."""


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    # At once: `dashboard --json` goes on after its answer, and the reader of a pipe waits for it.
    print(redact(dump_json(content, indent=2, default=str)), flush=True)


def print_json_line(content: Mapping[str, Any]) -> None:
    """Print one JSON object on one line and flush it, for a parent process that waits for it."""
    print(dump_json(content), flush=True)


def print_answer(
    to_json: Callable[[], Mapping[str, Any]], show: Callable[[], object], *, as_json: bool
) -> None:
    """Print a command's answer to standard output: as one JSON object, or as text by `show`."""
    if as_json:
        print_json(to_json())
    else:
        show()


def print_text(text: str) -> None:
    """Print text to standard output; add a newline if it lacks one."""
    print(text, end="" if text.endswith("\n") else "\n", flush=True)


def print_message(text: str, *, wraps: bool = True) -> None:
    """Print text to standard error; on a terminal, long lines continue below their beginning where it `wraps`."""
    shown = strip_unsafe_escapes(redact(text))
    if wraps and len(shown) > _SHORT_MESSAGE and is_terminal(sys.stderr):
        from cloudtrain.console.facts import fitting_lines

        width = columns_of(sys.stderr)
        shown = "\n".join(part for line in shown.split("\n") for part in fitting_lines(line, width))
    # In one write, so that the lines of threads do not mix.
    print(f"{shown}\n", end="", file=sys.stderr, flush=True)


def print_row(text: str) -> None:
    """Print a line of a table to standard error, as it is."""
    print_message(text, wraps=False)


def print_error(error: CloudtrainError, *, as_json: bool) -> None:
    """Print an error and its hint, and with `as_json` the JSON object."""
    if isinstance(error, SpecError):
        print_problems(error, as_json=as_json)
        return
    print_message(f"error: {error.for_terminal()}")
    if isinstance(error, SettingsError):
        from cloudtrain.console.source_lines import Excerpts

        for line in Excerpts(newest=_STARTED).at_place(error.message):
            print_message(line)
    for note in getattr(error, "__notes__", ()):
        print_message(note)
    if as_json:
        print_json_error(error.message, error.hint, error.exit_code)


def print_json_error(message: str, hint: str, exit_code: int) -> None:
    """Print an error as the command's JSON object."""
    print_json({"error": {"message": message, "hint": hint, "exit_code": exit_code}})


def print_declined(message: str, *, as_json: bool) -> None:
    """Print what was not done after the answer no to a question."""
    print_message(message)
    if as_json:
        print_json({"declined": message})


def print_problems(error: SpecError, *, as_json: bool) -> None:
    """Print the problems of a job, one per line; on a terminal also the lines of the file, with a caret at the place."""
    from cloudtrain.console.source_lines import Excerpts

    excerpts = Excerpts(newest=_STARTED)
    for problem in error.problems:
        # The place at its beginning is for editors, and what to write at its end is to be copied.
        print_message(str(problem), wraps=False)
        for line in excerpts.of_problem(problem):
            print_message(line, wraps=False)
    count = len(error.problems)
    plural = "" if count == 1 else "s"
    print_message(f"{count} problem{plural}")
    if as_json:
        fields = ("file", "line", "column", "path", "message", "hint")
        problems = [{name: getattr(problem, name) for name in fields} for problem in error.problems]
        print_json({"ok": False, "problems": problems})


def confirm_trust(error: UntrustedSettingsError | UntrustedHomeError) -> bool:
    """Ask whether to use what was found beside the job; return False without a terminal."""
    if not sys.stdin.isatty():
        return False
    import click

    if isinstance(error, UntrustedHomeError):
        print_message(error.message)
        return click.confirm("use it from now on?", default=False, err=True)
    what = "settings of an account"
    if all(name.startswith("slurm.") for name in error.values):
        what = "a Slurm site, whose lines are executed on its nodes as you"
    print_message(f"{error.file} beside the job gives {what}:")
    print_columns([(f"  {name}", value) for name, value in error.values.items()], write=print_row)
    return click.confirm("use them for this repository from now on?", default=False, err=True)


def print_columns(rows: Sequence[Sequence[str]], *, write: Callable[[str], None] = print) -> None:
    """Print rows of cells in columns, by default to standard output."""
    for line in column_lines(rows):
        write(line)


def column_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(cell_count, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def print_checks(
    checks: Sequence[tuple[str, str, str, Sequence[str]]],
    colours: Mapping[str, str],
    *,
    wraps: bool = False,
) -> None:
    """Print a check per line, with its notes below it. Lines are not wrapped, so that commands can be copied.

    Args:
        checks: Result, name, detail and notes of each check.
        colours: Colours (ANSI codes) by each possible result.
        wraps: On a terminal, continue long details and notes below their beginning, except notes with a command that
            has options.
    """
    longest = max(map(len, colours))
    width = max((cell_count(check[1]) for check in checks), default=0)
    indent = " " * (longest + width + 4)
    columns = terminal_width() if wraps else None
    room = None if columns is None else max(1, columns - len(indent))
    for result, name, detail, notes in checks:
        first, *others = [detail] if room is None else wrapped(detail, room)
        shown = coloured(pad(result, longest), colours[result]) if result in colours else result
        print(f"{pad(shown, longest)}  {pad(name, width)}  {first}")
        for note in notes:
            others += [note] if room is None or _is_copied(note) else wrapped(note, room)
        for line in others:
            print(f"{indent}{line}")


def _is_copied(note: str) -> bool:
    """Return whether a note has a command with options or quotes, which stays in one line."""
    return " --" in note or "'" in note


def coloured(text: str, colour: str, stream: IO[str] | None = None) -> str:
    """Return text in a colour (an ANSI code) where a stream is a terminal with colours, else unchanged.

    Args:
        text: The text.
        colour: The code, such as `1;31`.
        stream: Where it is written; by default standard output.
    """
    if os.environ.get("NO_COLOR") or not is_terminal(stream):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show on a terminal what the block waits for, after a second; see `console.waiting` for more."""
    from cloudtrain.console.waiting import waiting

    with waiting(text):
        yield


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Return a callback `(bytes_done, bytes_total)` that draws a progress bar on standard error.

    The bar appears only on a terminal and after one second, and disappears at 100 %. A later call starts a new bar.
    """
    started: float | None = None
    bar: Bar | None = None
    task: TaskID | None = None
    drawing = ExitStack()

    def show(done: int, total: int) -> None:
        nonlocal started, bar, task
        now = time.monotonic()
        if started is None:
            started = now
        is_due = now - started >= PROGRESS_DELAY_SECONDS
        if bar is None and is_due and is_terminal(sys.stderr):
            from cloudtrain.console.waiting import all_hidden

            drawing.enter_context(all_hidden())
            bar = _start_bar()
            task = bar.add_task(strip_unsafe_escapes(text), total=total, completed=done)
        if bar is not None and task is not None:
            bar.update(task, completed=done, total=total)
        if done >= total:
            end()

    def end() -> None:
        nonlocal started, bar
        if bar is not None:
            bar.stop()
        drawing.close()
        started = bar = None

    try:
        yield show
    finally:
        end()


def _start_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    parts = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    bar = Bar(*parts, console=Console(file=unfiltered(sys.stderr), stderr=True), transient=True)
    bar.start()
    return bar


def command_name() -> str:
    """Return the name or path by which this command was called: its path when PATH has another one."""
    # Its import takes 5 ms and few commands need it.
    import shutil

    called = sys.argv[0]
    found = shutil.which("cloudtrain")
    is_script = Path(called).name == "cloudtrain"
    if not is_script:
        return "cloudtrain"
    is_found = found is not None and Path(found).resolve() == Path(called).resolve()
    return "cloudtrain" if is_found else called
