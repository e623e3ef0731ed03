"""The process that imports torch once for all runs of a rehearsal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from cloudtrain_runtime.contract import INSTANCE_VARIABLE

_MODULE = "cloudtrain_runtime.launcher.shared_forks"
_END_SECONDS = 10.0


def with_shared_imports(command: Sequence[str], place: Path | None) -> list[str]:
    """Return a command that runs a module in a fork of the process at a place.

    Args:
        command: A command of Python with `-m MODULE`.
        place: Its socket; None where each process imports by itself.
    """
    if place is None:
        return list(command)
    module = command.index("-m") + 1
    return [*command[:module], _MODULE, "--run", str(place), *command[module:]]


class SharedImports:
    """Starts the process, which waits until a run asks for a fork, and ends it. Use it as a context manager.

    Args:
        folder: Folder of the rehearsal, by which its processes are found.

    Attributes:
        place: Socket at which it answers. Its path is short, as those of sockets have to be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = Path(tempfile.mkdtemp(prefix="cloudtrain-"))
        self.place = self._temporary / "forks"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the process. Where it does not start, each run imports by itself."""
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self.place)],
                env={**os.environ, INSTANCE_VARIABLE: str(self._folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate(timeout=_END_SECONDS)
