"""The port of the store of rank 0, held from the start of the process until torch listens there."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

_reserved: list[socket.socket] = []
"""Sockets that stay open until this process ends or executes another program."""


def reserve_master_port(environ: Mapping[str, str]) -> None:
    """Hold `MASTER_PORT` in the process of rank 0, so that Linux gives it to no other process.

    torchrun chooses a free port, and rank 0 listens on it seconds later, when it has imported torch. Until then the
    kernel may give the port to any connection of another process, and the run would fail with EADDRINUSE.
    A bound socket that does not listen prevents that, and both torch's store and this socket set SO_REUSEADDR, with
    which Linux lets the store listen on the same port. Other systems would refuse the store, and get no reservation.
    """
    if sys.platform != "linux" or environ.get("RANK") != "0":
        return
    try:
        held = hold_port(int(environ["MASTER_PORT"]))
    except (OSError, ValueError, OverflowError, KeyError):
        # torch itself reports a port that it cannot use.
        return
    _reserved.append(held)


def hold_port(port: int) -> socket.socket:
    """Return a socket that is bound to a port and does not listen: the store can listen there, and no one else gets it.

    Args:
        port: The port; 0 for a free one.

    Raises:
        OSError: Another process uses the port.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))
    except (OSError, OverflowError):
        held.close()
        raise
    return held
