"""Retry policy of the runtime's AWS clients: how often a request is attempted."""

from __future__ import annotations

import functools
import os
from typing import Any

from cloudtrain_runtime.process.event_log import log_line

_ATTEMPTS = 10


def max_attempts(default: int = _ATTEMPTS) -> int:
    """Return the maximum number of attempts of a request, with the first; AWS_MAX_ATTEMPTS overrides the default."""
    text = os.environ.get("AWS_MAX_ATTEMPTS") or str(default)
    try:
        attempts = int(text)
    except ValueError:
        attempts = 0
    if attempts < 1:
        _report_invalid(text)
    return attempts if attempts > 0 else default


@functools.cache  # one line per process
def _report_invalid(text: str) -> None:
    log_line(f"AWS_MAX_ATTEMPTS is {text!r}, which is not a positive integer: the default applies")


def client_retries(default: int = _ATTEMPTS) -> dict[str, Any]:
    """Return the `retries` of a botocore `Config`: standard mode, which backs off with jitter."""
    return {"mode": "standard", "total_max_attempts": max_attempts(default)}
