"""Signs in the last lines of a log that a program has failed although the run ended with exit code 0."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cloudtrain.runs.log_lines import split_rank
from cloudtrain_runtime.contract import parse_event

LAST_BYTES = 1 << 16
"""Part of a log, from its end, that is read."""

_HEADER = "Traceback (most recent call last):"
_IGNORED = "Exception ignored in"
"""Python prints it, and a traceback, for an error in a finalizer, which ends nothing."""
_EXCEPTION = re.compile(r"(?P<text>(?P<type>[A-Za-z_][\w.]*)(?::.*)?)$")
_HARMLESS = ("KeyboardInterrupt", "SystemExit")
_KILLED = re.compile(
    r".*: line \d+: +\d+ (?P<text>(?:Segmentation fault|Killed|Aborted|Bus error|Illegal instruction)\b)"
)
"""Bash reports a program that a signal has ended."""
_MOST_LINES_AFTER = 20
"""A program that prints more after an error, or reports progress, has survived it."""
_PROGRESS = ("step", "evaluation", "checkpoint", "started")
_SHOWN_CHARACTERS = 200


def find_hidden_failure(lines: Iterable[str]) -> str | None:
    """Return the error that the last lines of a log end with; None if there is none or the program has survived it.

    Args:
        lines: The last lines of one host, in order.
    """
    error: str | None = None
    since = 0
    is_open = is_ignored = False
    for line in lines:
        if (event := parse_event(line)) is not None:
            if event["event"] == "finished":
                return None
            if event["event"] in _PROGRESS:
                error = None
            continue
        text = split_rank(line.rstrip())[1]
        since += 1
        if text.startswith(_HEADER):
            is_open = not is_ignored
        elif is_open and text and not text[0].isspace():
            is_open = False
            match = _EXCEPTION.match(text)
            if match is not None and match["type"] not in _HARMLESS:
                error = match["text"]
                since = 0
        elif (match := _KILLED.match(text)) is not None:
            error = match["text"]
            since = 0
        is_ignored = text.startswith(_IGNORED)
    if error is None or since > _MOST_LINES_AFTER:
        return None
    return error[:_SHOWN_CHARACTERS]
