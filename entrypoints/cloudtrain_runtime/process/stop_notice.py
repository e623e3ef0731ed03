"""Stop notices: a spot interruption or a requested stop, received from the launcher or as a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.process.event_log import emit

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class StopNotice:
    """Whether this host has received a stop notice; checked at step boundaries."""

    def __init__(self, tree: MlTree) -> None:
        self._tree = tree
        # As text, because each step checks it.
        self._path = str(tree.stop_notice)
        self._is_signalled = False
        self._is_reported = False

    @property
    def is_given(self) -> bool:
        """Whether it is time to save and exit."""
        # Half of what os.path.exists costs, which raises and catches an error.
        return self._is_signalled or os.access(self._path, os.F_OK)

    def start(self) -> None:
        """Treat SIGTERM and SIGHUP as stop notices from now on, and inform the launcher that this process acts on them."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A signal may be ignored, as under nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
        if self._tree.in_training_loop.parent.is_dir():
            self._tree.in_training_loop.touch()

    def stop(self) -> None:
        """Inform the launcher that this process no longer acts on notices: the launcher then sends SIGTERM instead."""
        self._tree.in_training_loop.unlink(missing_ok=True)

    def report(self, step: int, *, is_main: bool, **fields: Any) -> None:
        """Record, once, that the ranks end before their last step. All ranks call it.

        Args:
            step: Optimizer steps done.
            is_main: Whether this is rank 0, which emits the event.
            fields: Further fields of the event.
        """
        if self._is_reported:
            return
        self._is_reported = True
        # On a full disk the event has to suffice.
        with contextlib.suppress(OSError):
            self._tree.stopped_early.touch()
        if is_main:
            emit("stopped", step=step, **fields)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Act on notices in this block, and restore the previous handlers after it."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.start()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the handler's signature)
        self._is_signalled = True
