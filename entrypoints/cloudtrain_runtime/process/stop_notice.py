"""The notice to stop: a spot interruption or a stop, told by the launcher or by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from cloudtrain_runtime.contract import MlTree


class StopNotice:
    """Whether this host was told to stop, asked at step boundaries.

    Args:
        tree: The host's /opt/ml.
    """

    def __init__(self, tree: MlTree) -> None:
        self._tree = tree
        self._path = str(tree.stop_notice)  # looked for at each step
        self._was_signalled = False

    @property
    def is_given(self) -> bool:
        """Whether it is time to save and leave."""
        return self._was_signalled or os.path.exists(self._path)  # noqa: PTH110 (a fifth of what pathlib's costs)

    def begin(self) -> None:
        """Take SIGTERM for a notice from now on, and let the launcher know that the notice is enough here."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)
        if self._tree.in_training_loop.parent.is_dir():
            self._tree.in_training_loop.touch()

    def end(self) -> None:
        """Tell the launcher that a notice has no effect any more: it ends what is left with SIGTERM."""
        self._tree.in_training_loop.unlink(missing_ok=True)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take notices in this block, and leave SIGTERM as it was before."""
        before = signal.getsignal(signal.SIGTERM)
        self.begin()
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            self.end()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the handler's signature)
        self._was_signalled = True
