"""Retry policy of the runtime's AWS clients: how often a request is attempted."""

from __future__ import annotations

import os
from typing import Any

_ATTEMPTS = 10


def max_attempts(default: int = _ATTEMPTS) -> int:
    """Return the maximum number of attempts of a request, with the first; AWS_MAX_ATTEMPTS overrides the default."""
    return int(os.environ.get("AWS_MAX_ATTEMPTS") or default)


def client_retries(default: int = _ATTEMPTS) -> dict[str, Any]:
    """Return the `retries` of a botocore `Config`: standard mode, which backs off with jitter."""
    return {"mode": "standard", "total_max_attempts": max_attempts(default)}
