"""What tests share besides fixtures."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
MOTO_SERVER = Path(__file__).with_name("moto_server.py")


@dataclass(frozen=True)
class Finished:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON object that it must be."""
        return json.loads(self.out)


Cli = Callable[..., Finished]


def command() -> Path:
    """Return the installed command."""
    return Path(sys.executable).with_name("cloudtrain")


@contextlib.contextmanager
def serve_moto(log: Path, script: Path = MOTO_SERVER) -> Iterator[str]:
    """Serve an empty moto on loopback; yield its address."""
    program = [sys.executable, str(script)]
    with log.open("w") as errors:
        server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait for something that another process will do; return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def processes_of(run: str) -> list[psutil.Process]:
    """Return the living processes that carry a run's name."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get("TRAINING_JOB_NAME") == run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Terminal:
    """A command in a pseudo terminal: what it writes, and keys."""

    def __init__(self, arguments: list[str], environment: dict[str, str], columns: int = 80) -> None:
        self.written = b""
        self.process, self._keys = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in a shell's background inherits deafness to it
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.execve(arguments[0], arguments, environment)  # noqa: S606 (no shell is what is wanted)

    def shows(self, text: str) -> bool:
        """Whether it has written a text so far; reads what is there."""
        while select.select([self._keys], [], [], 0)[0]:
            try:
                data = os.read(self._keys, 65536)
            except OSError:  # it has ended
                break
            if not data:
                break
            self.written += data
        return text in self.text

    @property
    def text(self) -> str:
        """What it has written so far, without what moves the cursor or colours, and without line breaks."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", "", self.written.decode("utf-8", "replace"))

    def press(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def end(self) -> int:
        """Wait for its end; return the exit code."""
        deadline = time.monotonic() + 180
        ended = (0, 0)
        while ended[0] == 0:
            assert time.monotonic() < deadline, f"it has not ended: {self.text}"
            self.shows("")
            ended = os.waitpid(self.process, os.WNOHANG)
            time.sleep(0.02)
        self.shows("")
        os.close(self._keys)
        return os.waitstatus_to_exitcode(ended[1])
