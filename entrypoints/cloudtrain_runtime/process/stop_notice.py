"""Stop notices: a spot interruption or a requested stop, received from the launcher or as SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from cloudtrain_runtime.contract import MlTree


class StopNotice:
    """Whether this host has received a stop notice; checked at step boundaries."""

    def __init__(self, tree: MlTree) -> None:
        self._tree = tree
        self._path = str(tree.stop_notice)  # checked at each step
        self._is_signalled = False

    @property
    def is_given(self) -> bool:
        """Whether it is time to save and exit."""
        return self._is_signalled or os.path.exists(self._path)  # noqa: PTH110 (a fifth of what pathlib's costs)

    def start(self) -> None:
        """Treat SIGTERM as a stop notice from now on, and inform the launcher that this process acts on notices."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
        if self._tree.in_training_loop.parent.is_dir():
            self._tree.in_training_loop.touch()

    def stop(self) -> None:
        """Inform the launcher that this process no longer acts on notices: the launcher then sends SIGTERM instead."""
        self._tree.in_training_loop.unlink(missing_ok=True)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Act on notices in this block, and restore the previous SIGTERM handler after it."""
        before = signal.getsignal(signal.SIGTERM)
        self.start()
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            self.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the handler's signature)
        self._is_signalled = True
