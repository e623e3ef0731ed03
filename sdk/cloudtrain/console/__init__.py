"""Text for people, JSON for programs. With `cli/`, the only place that prints.

People's text about a running command goes to standard error when `--json` asks for one object on standard output. Here
is what every command needs; what is said of plans, of the account and of runs stands in the modules.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.console.terminal import safe, unfiltered
from cloudtrain.errors import CloudtrainError, SpecError
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from cloudtrain.errors import UntrustedSettingsError

_PROGRESS_AFTER_SECONDS = 1.0

# ---------------------------------------------------------------- JSON and errors


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    print(redact(dump_json(content, indent=2, default=str)))


def print_line_of_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, at once: who started this command waits for it."""
    print(dump_json(content), flush=True)


def print_text(text: str) -> None:
    """Print text to standard output as it is."""
    print(text, end="" if text.endswith("\n") else "\n")


def say(text: str) -> None:
    """Print a line for people to standard error."""
    print(safe(redact(text)), file=sys.stderr, flush=True)


def print_error(error: CloudtrainError, *, as_json: bool) -> None:
    """Print what is wrong and what to do."""
    if isinstance(error, SpecError):
        print_problems(error, as_json=as_json)
        return
    say(f"error: {error}")
    if as_json:
        print_json_error(error.message, error.hint, error.exit_code)


def print_json_error(message: str, hint: str, exit_code: int) -> None:
    """Print an error as the one JSON object."""
    print_json({"error": {"message": message, "hint": hint, "exit_code": exit_code}})


def print_bug(error: Exception, *, as_json: bool) -> None:
    """Print that it is our fault."""
    say(f"error: this is a bug in cloudtrain: {type(error).__name__}: {error}")
    if as_json:
        print_json_error(f"bug: {type(error).__name__}: {error}", "", 1)


def print_problems(error: SpecError, *, as_json: bool) -> None:
    """Print every problem of a job, a line each."""
    for problem in error.problems:
        say(str(problem))
    count = len(error.problems)
    say(f"{count} problem{'s' if count != 1 else ''}")
    if as_json:
        fields = ("file", "line", "column", "path", "message", "hint")
        problems = [{name: getattr(problem, name) for name in fields} for problem in error.problems]
        print_json({"ok": False, "problems": problems})


def print_valid(job: str, name: str, *, as_json: bool) -> None:
    """Print that a job validates."""
    if as_json:
        print_json({"ok": True, "problems": []})
    else:
        print(f"{job}: {name} is valid")


def agrees(error: UntrustedSettingsError) -> bool:
    """Ask on the terminal whether to use the settings of a file beside the job; no where there is no terminal."""
    if not sys.stdin.isatty():
        return False
    import click

    say(f"{error.file} beside the job gives settings of an account:")
    for line in table_lines([(f"  {name}", value) for name, value in error.values.items()]):
        say(line)
    return click.confirm("use them for this repository from now on?", default=False, err=True)


# ---------------------------------------------------------------- tables


def table(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values, values one below the other."""
    for line in table_lines(rows):
        print(line)


def table_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines that `table` prints."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in rows]


def columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, each column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def red(text: str) -> str:
    """Return text as an alarm, in red where standard output is a terminal that shows colours."""
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[1;31m{text}\x1b[0m"


# ---------------------------------------------------------------- waiting


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that something takes a while."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(file=unfiltered(sys.stderr), stderr=True).status(escape(text)):
        yield


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told (bytes done, bytes in all) and draws a bar on standard error.

    Only on a terminal, and only when the work takes longer than a second. The bar goes when all is done; what is told
    then begins anew.
    """
    began: float | None = None
    bar: Bar | None = None
    task: TaskID | None = None

    def show(done: int, total: int) -> None:
        nonlocal began, bar, task
        now = time.monotonic()
        began = now if began is None else began
        if bar is None and now - began >= _PROGRESS_AFTER_SECONDS and sys.stderr.isatty():
            bar = _start_bar()
            task = bar.add_task(safe(text), total=total, completed=done)
        if bar is not None and task is not None:
            bar.update(task, completed=done, total=total)
        if done >= total:
            end()

    def end() -> None:
        nonlocal began, bar
        if bar is not None:
            bar.stop()
        began = bar = None

    try:
        yield show
    finally:
        end()


def _start_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, console=Console(file=unfiltered(sys.stderr), stderr=True), transient=True)
    bar.start()
    return bar


# ---------------------------------------------------------------- what to type


def program() -> str:
    """Return what to type to call this command again: its path, where it is not the one on PATH."""
    called = sys.argv[0]
    import shutil  # 5 ms that only some commands need

    found = shutil.which("cloudtrain")
    is_script = Path(called).name == "cloudtrain"
    return called if is_script and (found is None or Path(found).resolve() != Path(called).resolve()) else "cloudtrain"
