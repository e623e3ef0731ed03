"""The process that stands in for the service, as the one that starts it sees it.

It needs a twentieth of a second before it can do anything. A command that is about to start a run starts it first, and
tells it the folder when there is one: what takes long there goes on beside what takes long here. So this module imports
nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

READY = b"ready\n"
"""What it says when it waits for the folder."""

_COMMAND = (sys.executable, "-P", "-m", "cloudtrain.container")
_waiting: list[_Waiting] = []


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Start the process now for the local run that comes within; where none comes, nothing is left of it."""
    with contextlib.suppress(OSError):  # no room for one now, which is the run's matter when it comes
        _waiting.append(_Waiting())
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().end()


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the process that watches the run in a folder, or tell the one that waits.

    Args:
        folder: The run's folder.
        log: File that its output is appended to.
    """
    if _waiting and (told := _waiting.pop().tell(folder, log)) is not None:
        return told
    with log.open("ab") as output:
        return subprocess.Popen(
            [*_COMMAND, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )


class _Waiting:
    """The process, as long as it has no folder. It ends when the one that has started it ends."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=os.path.sep,
        )

    def tell(self, folder: Path, log: Path) -> subprocess.Popen[bytes] | None:
        """Give it a folder; return None, and end it, where it cannot be what would be started now."""
        if dict(os.environ) == self._environ:
            # A path may hold any character but this one.
            message = b"\0".join(os.fsencode(path.absolute()) for path in (folder, log))
            with contextlib.suppress(OSError):
                is_ready = _stream(self._process.stdout).readline() == READY
                _stream(self._process.stdin).write(message)
                self._close()
                if is_ready:
                    return self._process
        self.end()
        return None

    def end(self) -> None:
        """End it: nothing has been done yet."""
        self._process.kill()
        self._close()
        self._process.wait()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what could not be written any more
                _stream(stream).close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # noqa: S101 (it was started with pipes)
    return stream
