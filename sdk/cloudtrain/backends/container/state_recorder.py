"""Recording of a local run's state, also on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.container.state_file import RecordedState, write_state

_RESERVE_FILE = ".reserve"
_RESERVE_BYTES = 1 << 16
_LAST_SECONDS = 30.0
_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 0.5
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Recorder:
    """Keeps a run's state in memory and writes it to state.json when possible.

    A file of 64 KiB reserves space for the last state. It is deleted before that state is written.

    Args:
        root: The run's folder.
    """

    def __init__(self, root: Path) -> None:
        self.state: RecordedState | None = None
        self._root = root
        self._reserve = root / _RESERVE_FILE
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def record(self, state: RecordedState) -> None:
        """Write a state. After a failure the run continues, and the next state is written instead."""
        self.state = state
        self._try()

    def record_last(self, state: RecordedState) -> None:
        """Write the final state; retry failures for up to 30 s."""
        self.state = state
        with contextlib.suppress(OSError):
            self._reserve.unlink()
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)
        deadline = time.monotonic() + _LAST_SECONDS
        while not self._try() and time.monotonic() < deadline:
            time.sleep(backoff.next_seconds())

    def _try(self) -> bool:
        if self.state is None:
            return True
        try:
            write_state(self._root, self.state)
        except OSError as error:
            print_line(f"the state {self.state.state} ({self.state.reason}) could not be recorded: {error}")
            return False
        return True


def print_line(text: str) -> None:
    """Print a line to supervisor.log, if possible."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode("utf-8", "replace"))


def describe_error(error: BaseException, root: Path) -> str:
    """Return the reason of a run that failed because of the local backend itself."""
    if isinstance(error, OSError) and error.errno in _FULL:
        place = error.filename or root
        return f"the disk is full ({place}): free some space, then continue with cloudtrain resume {root.name}"
    if isinstance(error, OSError):
        return f"cloudtrain's local backend failed: {error}; see supervisor.log"
    return f"cloudtrain's local backend failed: {type(error).__name__}: {error}; see supervisor.log"
