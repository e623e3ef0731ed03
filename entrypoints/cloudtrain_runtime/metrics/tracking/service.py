"""The process that logs a run to its trackers. `process.py` starts it and ends it.

It reads events from a file that grows, until its standard input ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.constants import EVENTS_FILE_VARIABLE
from cloudtrain_runtime.metrics.tracking.background import BackgroundLogger
from cloudtrain_runtime.metrics.tracking.process import CLOSE_SECONDS, ENDED_FILE, EVENTS_FILE
from cloudtrain_runtime.metrics.tracking.services import trackers_of
from cloudtrain_runtime.metrics.tracking.tracker import Ending
from cloudtrain_runtime.process.environment import read_run_config

_POLL_SECONDS = 0.5
_PIECE_BYTES = 1 << 20


def main() -> None:
    """Log the events of a file until standard input ends, and then wait for the services, at most 90 s."""
    # A stop ends the ranks first, whose last values are still to come.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # What this process reports is no metric of the run.
    os.environ.pop(EVENTS_FILE_VARIABLE, None)
    folder = Path(sys.argv[1])
    config = read_run_config(os.environ)
    if config is None:
        sys.exit("no run.json: only cloudtrain's launcher can start this process")
    loggers = [BackgroundLogger(each) for each in trackers_of(config, folder)]
    reader = EventReader(folder / EVENTS_FILE, loggers)
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        reader.read()
    word = sys.stdin.readline().strip()
    reader.read()
    ending = Ending(word) if word in [each.value for each in Ending] else None
    for logger in loggers:
        logger.close(ending)
    deadline = time.monotonic() + CLOSE_SECONDS
    for logger in loggers:
        logger.join(deadline)
    (folder / ENDED_FILE).touch()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of a service may wait for a server that never answers.
    os._exit(0)


class EventReader:
    """Reads the lines that are appended to a file, and gives their events to loggers.

    Args:
        file: The file.
        loggers: What gets the events.
    """

    def __init__(self, file: Path, loggers: list[BackgroundLogger]) -> None:
        self._file = file
        self._loggers = loggers
        self._offset = 0

    def read(self) -> None:
        """Read the complete lines that are new."""
        with self._file.open("rb") as source:
            while True:
                source.seek(self._offset)
                piece = source.read(_PIECE_BYTES)
                complete = piece.rfind(b"\n") + 1
                if not complete and len(piece) < _PIECE_BYTES:
                    return
                # A longer line is no event.
                complete = complete or len(piece)
                self._offset += complete
                self._take(piece[:complete].decode("utf-8", "replace"))

    def _take(self, lines: str) -> None:
        for line in lines.splitlines():
            event = parse_event(line)
            if event is None:
                continue
            for logger in self._loggers:
                logger.on_event(event)


if __name__ == "__main__":
    main()
