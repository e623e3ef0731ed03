"""Forked processes that look like a new interpreter with other arguments, except for modules imported already."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from cloudtrain_runtime.launcher import linux

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}

Mask = Iterable[int]
"""Signals that a thread blocks."""


def hold_signals() -> Mask:
    """Block signals until a fork has its new identity; return the mask for `assume_identity` or `release_signals`."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def release_signals(mask: Mask) -> None:
    """Unblock signals."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def assume_identity(argv: list[str], environ: Mapping[str, str], mask: Mask) -> None:
    """Take on arguments and an environment, and handle signals as a new process does.

    Args:
        argv: The interpreter, its options and the program.
        environ: The complete environment.
        mask: The result of `hold_signals`.
    """
    os.environ.clear()
    os.environ.update(environ)
    sys.orig_argv = argv
    linux.set_proc_cmdline(argv, environ)
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    release_signals(mask)


def unbuffer_output() -> None:
    """Make standard output and error unbuffered, as `python -u` and PYTHONUNBUFFERED do."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = _unbuffered(getattr(sys, name), descriptor)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _unbuffered(stream: TextIO, descriptor: int) -> TextIO:
    stream.flush()
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    raw.name = stream.name
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
