"""Signals of torchrun's agent: it ends its ranks only when the launcher has asked for it.

A logout, Kubernetes, Slurm and the end of a machine send SIGTERM to every process of a host. The ranks take it as the
notice to save at their next step, which they do within the grace time of the container. An agent that obeyed the same
signal would end them 30 s later, as torchrun's does. So the launcher, which gets the signal, too, and knows the grace
time, first sends `END_RANKS_SIGNAL` to the agent; a stop signal before that is ignored.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

END_RANKS_SIGNAL: Final = signal.SIGUSR1
"""Announces a stop signal of the launcher. It ends an agent that has not set its handlers yet."""

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_is_asked = False


def handle_stop_signals() -> None:
    """Set this process's handlers: a stop signal raises SignalException if the launcher has announced it."""
    signal.signal(END_RANKS_SIGNAL, note_request)
    for number in STOP_SIGNALS:
        signal.signal(number, _on_stop)


def is_asked_to_end() -> bool:
    """Return whether the launcher has asked to end the ranks."""
    return _is_asked


def note_request(_number: int, _frame: FrameType | None) -> None:
    """Note that the launcher asks to end the ranks; the handler of `END_RANKS_SIGNAL`."""
    global _is_asked  # noqa: PLW0603 (a process has one launcher)
    _is_asked = True


def _on_stop(number: int, _frame: FrameType | None) -> None:
    if not _is_asked:
        return
    from torch.distributed.elastic.multiprocessing import SignalException

    received = signal.Signals(number)
    raise SignalException(f"process {os.getpid()} received {received.name}", received)
