"""Ranks of a start meet as soon as the first one listens.

Rank 0 opens the store at which the others find each other. A rank that comes before it is refused, and torch lets it
ask again after 0.4 to 0.8 s (seen with torch 2.13): forked workers come within milliseconds, so half of all starts and
restarts would wait so long for nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import socket
import time
from typing import Any

_PATIENCE_SECONDS = 30.0
"""From then on torch waits, in its own way and for as long as it was told to."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05
_PARAMETERS = ["hostname", "port", "rank"]


def connect_without_backoff() -> None:
    """Have each rank but the first ask in short turns whether the store listens, before torch connects to it."""
    # By name: the package has a function that is called as the module is.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    connect = getattr(rendezvous, "_create_c10d_store", None)
    if connect is None or list(inspect.signature(connect).parameters)[:3] != _PARAMETERS:
        return  # another torch: its own way will do

    @functools.wraps(connect)
    def connect_in_time(hostname: str, port: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        if rank != 0:
            wait_for_listener(hostname, port, _PATIENCE_SECONDS)
        return connect(hostname, port, rank, *args, **kwargs)

    rendezvous._create_c10d_store = connect_in_time  # noqa: SLF001 (the one seam of env:// and tcp://)


def wait_for_listener(host: str, port: int, seconds: float) -> bool:
    """Return whether something listens at an address, as soon as it does or when so many seconds have passed."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while not _listens(host, port):
        if time.monotonic() + pause >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:  # refused, or a name that is not known yet
        return False
    return True
