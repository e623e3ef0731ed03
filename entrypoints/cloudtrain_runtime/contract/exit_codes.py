"""Exit codes in words."""

from __future__ import annotations

import signal


def describe_exit(exit_code: int) -> str:
    """Return `exit code 1` or, for a process ended by a signal, `SIGKILL`."""
    if exit_code < 0:
        try:
            return signal.Signals(-exit_code).name
        except ValueError:
            return f"signal {-exit_code}"
    return f"exit code {exit_code}"
