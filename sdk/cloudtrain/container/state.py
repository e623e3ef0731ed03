"""`state.json`: what the process that watches a local run has written down last."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cloudtrain.run import State
from cloudtrain.whole import write_whole

STATE_FILE = "state.json"
LOCK_FILE = "supervisor.lock"


@dataclass(frozen=True)
class RecordedState:
    """One snapshot. `supervisor` is the process id of the watcher."""

    state: State
    reason: str = ""
    started: datetime | None = None
    ended: datetime | None = None
    supervisor: int | None = None
    artifacts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def but(self, **changes: Any) -> RecordedState:
        """Return a copy with changes."""
        return dataclasses.replace(self, **changes)


def write_state(root: Path, record: RecordedState) -> None:
    """Replace state.json in one step."""
    content = dataclasses.asdict(record)
    for name in ("started", "ended"):
        moment = getattr(record, name)
        content[name] = moment.isoformat() if moment else None
    write_whole(root / STATE_FILE, json.dumps(content, indent=1) + "\n")


def read_state(root: Path) -> RecordedState:
    """Read state.json.

    Raises:
        FileNotFoundError: there is none.
    """
    text = (root / STATE_FILE).read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
        moments = {
            name: datetime.fromisoformat(content[name]) if content[name] else None for name in ("started", "ended")
        }
        return RecordedState(**{**content, **moments, "state": State(content["state"])})
    except (ValueError, TypeError, KeyError, AttributeError):
        # It is only ever replaced as a whole: someone else has written to it.
        return RecordedState(State.FAILED, f"{root / STATE_FILE} is damaged, so how the run ended is not known")


def is_watched(root: Path) -> bool:
    """Whether a living process watches this run: it holds the lock until it is gone."""
    try:
        return is_held(root / LOCK_FILE)
    except FileNotFoundError:
        return False


def is_held(lock: Path) -> bool:
    """Whether a living process holds a lock file. Several may look at once: looking takes a shared lock only.

    Raises:
        OSError: there is no such file, or it cannot be opened.
    """
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
