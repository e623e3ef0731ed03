"""How log lines are printed: with their host for people, as one JSON object for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cloudtrain.console import say
from cloudtrain.console.runs import detached, readable
from cloudtrain.console.terminal import unfiltered
from cloudtrain.errors import EXIT_DONE, EXIT_INTERRUPTED, CloudtrainError
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.runs.log_lines import LogLine
    from cloudtrain.runs.run import Run

HOST_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


def print_logs(run: Run, lines: Iterable[LogLine], *, follow: bool, raw: bool, is_filtered: bool = False) -> int:
    """Print log lines with their host, events as people read them unless raw; Ctrl-C leaves the run alone."""
    prefix = host_prefixes()
    is_empty = True
    try:
        for line in lines:
            is_empty = False
            if raw:
                _print_raw(prefix(line.host), line, flush=follow)
            elif (text := readable(line)) is not None:
                print(f"{prefix(line.host)}  {text}", flush=follow)
    except KeyboardInterrupt:
        return detached(run, "logs -f")
    if is_empty:
        say("no line of the log matches" if is_filtered else "the log is empty")
    return EXIT_DONE


def _print_raw(host: str, line: LogLine, *, flush: bool) -> None:
    """Print a line byte for byte as it was written."""
    out = unfiltered(sys.stdout)
    content = line.raw if line.raw is not None else line.text.encode("utf-8", "surrogatepass")
    out.flush()
    out.buffer.write(host.encode() + b"  " + content + b"\n")
    if flush:
        out.buffer.flush()


def print_logs_json(run: Run, lines: Iterable[LogLine], *, follow: bool) -> int:
    """Print one JSON object while its lines arrive, so that a log of any length needs no memory.

    It is whole however that ends: an error in the middle becomes its last key.
    """
    exit_code, closing = EXIT_DONE, "]"
    print(f'{{\n  "run": {dump_json(run.id)},\n  "lines": [', end="")
    try:
        for index, line in enumerate(lines):
            print(f"{',' if index else ''}\n    {dump_json(_as_json(line))}", end="", flush=follow)
            closing = "\n  ]"
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    except CloudtrainError as error:
        say(f"error: {error}")
        exit_code = error.exit_code
        content = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        closing += f',\n  "error": {dump_json(content)}'
    print(f"{closing}\n}}")
    return exit_code


def host_prefixes() -> Callable[[str], str]:
    """Return what makes a host's name the prefix of its lines: in a colour of its own, on a terminal that has some."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return str
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    if Console().color_system is None:
        return str
    known: dict[str, str] = {}

    def prefix(host: str) -> str:
        if host not in known:
            colour = HOST_COLOURS[len(known) % len(HOST_COLOURS)]
            known[host] = Style(color=colour).render(host, color_system=ColorSystem.STANDARD)
        return known[host]

    return prefix


def _as_json(line: LogLine) -> dict[str, str | float | None]:
    return {"host": line.host, "text": line.text, "time": line.time}
