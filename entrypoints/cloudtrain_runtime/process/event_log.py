"""Event lines and messages on standard output. Event lines are the only source of progress."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from cloudtrain_runtime.contract import format_event
from cloudtrain_runtime.contract.constants import EVENTS_FILE_VARIABLE
from cloudtrain_runtime.contract.redaction import redact

_EXACT_FROM = 1e9
"""Larger numbers are times in seconds since the epoch, which six significant digits would round to days."""


_listeners: list[Callable[[dict[str, Any]], None]] = []


def add_listener(listener: Callable[[dict[str, Any]], None]) -> None:
    """Call a function with each event of this process, as readers of the log get it. It must return at once."""
    _listeners.append(listener)


def emit(event: str, **fields: Any) -> None:
    """Print one event line.

    A single write call prints it, so that lines of several processes on the same log never mix. A number that is not
    finite becomes null, because JSON cannot represent it. Secrets in texts are redacted.
    """
    values = {name: _json_value(value) for name, value in fields.items()}
    values["time"] = round(time.time(), 3)
    line = format_event(event, values) + "\n"
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), line.encode())
    if file := os.environ.get(EVENTS_FILE_VARIABLE):
        _append(file, line)
    for listener in _listeners:
        listener({"event": event, **values})


def _append(file: str, line: str) -> None:
    # In one call, so that lines of several processes do not mix. A full disk is no reason to end a training.
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def log_line(text: str) -> None:
    """Print one line for people in a single write call, with secrets redacted."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{redact(text)}\n".encode())


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if abs(value) < _EXACT_FROM:
            return float(f"{value:.6g}")
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _json_value(part) for name, part in value.items()}
    return redact(value) if isinstance(value, str) else value
