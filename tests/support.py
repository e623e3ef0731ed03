"""What tests share besides fixtures."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent
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
