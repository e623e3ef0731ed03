"""The process that logs a run to trackers, as its launcher sees it: start, events, end.

Events reach it by a file, to which every process of the first host appends what it prints. So nothing that a tracker
does can delay training, and a rank that is killed loses no value. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Final

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.constants import EVENTS_FILE_VARIABLE
from cloudtrain_runtime.contract.ml_tree import MlTree
from cloudtrain_runtime.process.event_log import emit

CLOSE_SECONDS: Final = 90.0
"""How long the end of the run waits for the last values, while a service has not failed: a slow import takes 10 s."""

EVENTS_FILE: Final = "events"
ENDED_FILE: Final = "ended"
"""File that the process writes when it has logged what it could."""

_MARGIN_SECONDS = 5.0
"""How much longer the process may take to end than its services."""

_MODULE = "cloudtrain_runtime.metrics.tracking.service"


class TrackingProcess:
    """Starts the process that logs a run to its trackers.

    It is in a session of its own, so that signals for the ranks do not reach it, and ends when this process does.

    Args:
        tree: Folders of this host.
        environment: Variables of the ranks, with the secrets.
        output: Descriptor of its output; None is this process's own.
    """

    def __init__(
        self, tree: MlTree, environment: Mapping[str, str], output: int | None = None
    ) -> None:
        self.events = tree.tracking / EVENTS_FILE
        # PID 1 reaps every child, so that an exit code may be unknown here.
        self._ended = tree.tracking / ENDED_FILE
        self._environment = dict(environment)
        self._cwd = tree.code
        self._output = output
        tree.tracking.mkdir(parents=True, exist_ok=True)
        self.events.write_bytes(b"")
        self._ended.unlink(missing_ok=True)
        # For the events of this process, such as the values that it finds in a script's output.
        os.environ[EVENTS_FILE_VARIABLE] = str(self.events)
        self._process = self._start()

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the processes whose events are logged."""
        return {EVENTS_FILE_VARIABLE: str(self.events)}

    def end(self, ending: str = "", most_seconds: float | None = None) -> None:
        """Wait until the remaining values are logged, at most 90 s.

        Args:
            ending: `finished`, `stopped` or `failed`, if the events do not say it.
            most_seconds: How long it may take, if that is less.
        """
        seconds = CLOSE_SECONDS + _MARGIN_SECONDS
        if most_seconds is not None:
            seconds = min(seconds, most_seconds)
        deadline = time.monotonic() + seconds
        self._close(ending, deadline)
        if not self._ended.exists() and time.monotonic() < deadline:
            # It was killed, perhaps for its memory. Another one logs what that has not logged.
            self._process = self._start()
            self._close(ending, deadline)
        if not self._ended.exists():
            emit("tracking", detail="the process of the trackers was killed: values may be missing")
        # The services of its trackers, which may have outlived it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self.events.parent)],
            cwd=self._cwd,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def _close(self, ending: str, deadline: float) -> None:
        """Let the process end, at the latest at the deadline."""
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError):
                stdin.write(f"{ending}\n".encode())
                stdin.flush()
            with contextlib.suppress(OSError):
                stdin.close()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def start_tracking(
    tree: MlTree, config: RunConfig, environment: Mapping[str, str], output: int | None = None
) -> TrackingProcess:
    """Start the process that logs a run to its trackers.

    Raises:
        JobError: a package is not installed.
    """
    from cloudtrain_runtime.metrics.tracking.services import trackers_of

    for tracker in trackers_of(config, tree.tracking):
        tracker.require_packages()
    return TrackingProcess(tree, environment, output)
