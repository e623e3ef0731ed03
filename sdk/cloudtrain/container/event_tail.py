"""Event lines of a run's hosts, collected in `events.jsonl` while the run lasts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.container.lines import LineTail
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.strict_json import dump_json


class EventTail:
    """Reads event lines from the hosts' logs as they grow, and appends them to a file.

    What a full disk refuses is kept in memory and written by a later `read`.

    Args:
        logs: A log by host.
        target: The file that gets one JSON object per line.

    Attributes:
        seen: The events so far, without those of steps, of which there may be millions.
    """

    def __init__(self, logs: Mapping[str, Path], target: Path) -> None:
        self.seen: list[dict[str, Any]] = []
        self._tails = [LineTail(path) for path in logs.values()]
        self._pending = b""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._out = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def read(self) -> None:
        """Take in what has been written since the last time; a line without its end stays for the next."""
        new: list[dict[str, Any]] = []
        for tail in self._tails:
            new += (event for line in tail.read() if (event := parse_event(line.decode("utf-8", "replace"))))
        self.seen += (event for event in new if event["event"] != "step")
        self._pending += b"".join(dump_json(event).encode() + b"\n" for event in new)
        with contextlib.suppress(OSError):
            while self._pending:
                self._pending = self._pending[os.write(self._out, self._pending) :]

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()
        os.close(self._out)
