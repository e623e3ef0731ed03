"""Stop signals that arrive while the launcher is still importing.

The kernel discards a signal to PID 1 without a handler. The launcher therefore imports this module first, which needs
only `signal`.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_received: list[int] = []


def record_stop_signals() -> None:
    """Remember stop signals until the launcher can act on them."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda received, _: _received.append(received))


def was_stop_received() -> bool:
    """Return whether a stop signal has arrived since `record_stop_signals`."""
    return bool(_received)
