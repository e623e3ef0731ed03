"""Output of log lines: with their host as text, or as one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cloudtrain.console import coloured, print_message
from cloudtrain.console.runs import format_log_line, print_detached
from cloudtrain.console.terminal import unfiltered
from cloudtrain.errors import EXIT_DONE, EXIT_INTERRUPTED, CloudtrainError, UserError, did_you_mean
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter
from cloudtrain_runtime.contract.hosts import sort_hosts
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.runs.log_lines import LogLine
    from cloudtrain.runs.run import Run

HOST_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
"""Colours of hosts, by their names in rich."""
_ANSI_COLOURS = ("36", "32", "33", "35", "34", "96", "92", "95")


def print_logs(run: Run, lines: Iterable[LogLine], *, follow: bool, raw: bool, only: LogFilter = ALL_LINES) -> int:
    """Print log lines with their host; format events as text unless `raw`. Ctrl-C does not end the run.

    Raises:
        UserError: No line matches, and the run has no such host.
    """
    prefix = host_prefixes()
    is_empty = True
    try:
        for line in lines:
            is_empty = False
            if raw:
                _print_raw(prefix(line.host), line, flush=follow)
            elif (text := format_log_line(line)) is not None:
                print(f"{prefix(line.host)}  {text}", flush=follow)
    except KeyboardInterrupt:
        return print_detached(run, "logs -f")
    if is_empty:
        if only.host is not None and not follow:
            _require_host(run, only.host)
        print_message("the log is empty" if only == ALL_LINES else "no line of the log matches")
    return EXIT_DONE


def _require_host(run: Run, host: str) -> None:
    known = sort_hosts(list({line.host for line in run.logs()}))
    if known and host not in known:
        raise UserError(f"{run.id} has no log of a host {host}", did_you_mean(host, known))


def _print_raw(host: str, line: LogLine, *, flush: bool) -> None:
    """Print a line byte for byte as it was written."""
    out = unfiltered(sys.stdout)
    content = line.raw if line.raw is not None else line.text.encode("utf-8", "surrogatepass")
    out.flush()
    out.buffer.write(host.encode() + b"  " + content + b"\n")
    if flush:
        out.buffer.flush()


def print_logs_json(run: Run, lines: Iterable[LogLine], *, follow: bool) -> int:
    """Print one JSON object line by line, so that memory does not grow with the log.

    The object is always complete: an error becomes its last key.
    """
    exit_code, closing = EXIT_DONE, "]"
    print(f'{{\n  "run": {dump_json(run.id)},\n  "lines": [', end="")
    try:
        for index, line in enumerate(lines):
            content = {"host": line.host, "text": line.text, "time": line.time}
            print(f"{',' if index else ''}\n    {dump_json(content)}", end="", flush=follow)
            closing = "\n  ]"
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    except CloudtrainError as error:
        print_message(f"error: {error}")
        exit_code = error.exit_code
        failure = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        closing += f',\n  "error": {dump_json(failure)}'
    print(f"{closing}\n}}")
    return exit_code


def host_prefixes() -> Callable[[str], str]:
    """Return a function that formats a host's name as prefix of its lines, in a colour per host on a terminal."""
    known: dict[str, str] = {}

    def prefix(host: str) -> str:
        return coloured(host, known.setdefault(host, _ANSI_COLOURS[len(known) % len(_ANSI_COLOURS)]))

    return prefix
