"""Wait for a server that is about to listen.

Rank 0 opens the store through which the ranks find each other. A rank that connects earlier is refused, and torch
retries after 0.4 to 0.8 s (measured with torch 2.13). Forked workers connect within milliseconds of each other, so half
of all starts and restarts would incur that delay.
"""

from __future__ import annotations

import socket
import time

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.002, 0.05


def wait_for_listener(host: str, port: int, timeout_seconds: float) -> bool:
    """Wait until a process listens at an address, up to a timeout in seconds; return whether one does."""
    deadline, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
    while not _is_listening(host, port):
        if time.monotonic() + pause >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    return True


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:  # refused, or a host name that does not resolve yet
        return False
    return True
