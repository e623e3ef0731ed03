"""Faster rendezvous: ranks connect as soon as the store of rank 0 listens.

Rank 0 opens the store through which the ranks find each other. A rank that connects earlier is refused, and torch
retries after 0.4 to 0.8 s (measured with torch 2.13). Forked workers connect within milliseconds of each other, so half
of all starts and restarts would incur that delay.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import socket
import time
from typing import Any

_TIMEOUT_SECONDS = 30.0
"""How long this module polls. After that torch connects with its own back-off and timeout."""

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.002, 0.05
_PARAMETERS = ["hostname", "port", "rank"]


def connect_without_backoff() -> None:
    """Make every rank except the first poll at short intervals until the store listens, before torch connects."""
    # Imported by name: the package has a function with the same name as the module.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    connect = getattr(rendezvous, "_create_c10d_store", None)
    if connect is None or list(inspect.signature(connect).parameters)[:3] != _PARAMETERS:
        return  # another version of torch: keep its own behaviour

    @functools.wraps(connect)
    def connect_when_listening(hostname: str, port: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        if rank != 0:
            wait_for_listener(hostname, port, _TIMEOUT_SECONDS)
        return connect(hostname, port, rank, *args, **kwargs)

    rendezvous._create_c10d_store = connect_when_listening  # noqa: SLF001 (the only hook of env:// and tcp://)


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
