"""Helpers of tests: the command, moto, waiting, processes and terminals."""

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

from support.screen import Screen

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
MOTO_SERVER = Path(__file__).with_name("moto_server.py")


@dataclass(frozen=True)
class Finished:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, parsed as one JSON object."""
        return json.loads(self.out)


Cli = Callable[..., Finished]


def command() -> Path:
    """Return the path of the installed command."""
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
        server.wait(300)
        server.stdout.close()


def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait until a condition is true; return its value. The limit is for hangs: a machine under load is slow."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"the condition is not met after {seconds} s"
        time.sleep(0.05)
    return found


def processes_of(run: str) -> list[psutil.Process]:
    """Return the live processes of a run, recognised by their environment."""
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
    """A command in a pseudo terminal."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], columns: int = 80
    ) -> None:
        self.written = b""
        self.process, self._keys = pty.fork()
        if self.process == 0:
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # ignored in background jobs of a shell, which is inherited
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.execve(arguments[0], arguments, environment)  # noqa: S606 (without a shell)

    def shows(self, text: str) -> bool:
        """Read the available output; return whether the output so far contains a text."""
        while select.select([self._keys], [], [], 0)[0]:
            try:
                data = os.read(self._keys, 65536)
            except OSError:  # the command has ended
                break
            if not data:
                break
            self.written += data
        return text in self.text

    @property
    def text(self) -> str:
        """The output so far, without escape sequences and line breaks."""
        return "".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The output so far as lines without escape sequences. Lines that were drawn over are among them."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode("utf-8", "replace"))
        return text.replace("\r", "").split("\n")

    @property
    def screen(self) -> list[str]:
        """What the terminal shows, with all that has scrolled off, without colours."""
        screen = Screen()
        screen.write(self.written.decode("utf-8", "replace"))
        return screen.lines()

    def press(self, keys: bytes) -> None:
        """Send keys to the command."""
        os.write(self._keys, keys)

    def end(self) -> int:
        """Wait until the command ends; return its exit code."""
        deadline = time.monotonic() + 180
        ended = (0, 0)
        while ended[0] == 0:
            assert time.monotonic() < deadline, f"the command has not ended: {self.text}"
            self.shows("")
            ended = os.waitpid(self.process, os.WNOHANG)
            time.sleep(0.02)
        self.shows("")
        os.close(self._keys)
        return os.waitstatus_to_exitcode(ended[1])
