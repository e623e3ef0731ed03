"""`state.json`, the last recorded state of a local run, and the lock of its supervisor."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.errors import UnreadableStateError
from cloudtrain.runs.moved_home import relocate
from cloudtrain.runs.status import State
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.home_folder import find_owner
from cloudtrain.support.regular_files import open_regular, read_regular
from cloudtrain_runtime.contract.format_version import FIELD, NewerFormatError, check_not_newer
from cloudtrain_runtime.contract.json_checks import (
    MismatchError,
    ObjectSchema,
    count,
    mapping,
    normalise,
    nullable,
    text,
    timestamp,
)
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

STATE_FILE = "state.json"
LOCK_FILE = "supervisor.lock"
STATE_VERSION = 1
_PID_BYTES = 20


@dataclass(frozen=True)
class RecordedState:
    """Content of state.json.

    Attributes:
        state: The state.
        reason: Its reason; may be empty.
        started: When the instances ran.
        ended: When the run ended.
        supervisor: Process id of the supervisor.
        artifacts: Paths by name.
        ending: The final state of a run whose training has ended and whose results are being stored, or None.
        unstored: What a run that has ended well could not store, why, and what to do; empty if it has stored all.
        attempt: Number of the attempt that recorded it, on a cluster with a queue; None elsewhere.
    """

    state: State
    reason: str = ""
    started: datetime | None = None
    ended: datetime | None = None
    supervisor: int | None = None
    artifacts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ending: State | None = None
    unstored: str = ""
    attempt: int | None = None

    def but(self, **changes: Any) -> RecordedState:
        """Return a copy with changes."""
        return dataclasses.replace(self, **changes)


def _state(value: Any) -> State:
    try:
        return State(text(value))
    except ValueError:
        raise MismatchError(f"one of {', '.join(State)}", value) from None


def _time(value: Any) -> datetime:
    try:
        found = datetime.fromisoformat(text(value))
        zoned = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        timestamp(zoned.timestamp())
    except (ValueError, OverflowError):
        raise MismatchError("a time", value) from None
    return zoned


_STATE = ObjectSchema(
    {"state": _state},
    {
        "reason": text,
        "started": nullable(_time),
        "ended": nullable(_time),
        "supervisor": nullable(count),
        "artifacts": mapping(text),
        "ending": nullable(_state),
        "unstored": text,
        "attempt": nullable(count),
    },
)


def write_state(root: Path, record: RecordedState) -> None:
    """Replace state.json atomically."""
    content = dataclasses.asdict(record)
    for name in ("started", "ended"):
        recorded = getattr(record, name)
        content[name] = recorded.isoformat() if recorded else None
    if record.attempt is None:
        del content["attempt"]
    content[FIELD] = STATE_VERSION
    write_atomically(root / STATE_FILE, dump_json(content, indent=1) + "\n")


def read_state(root: Path) -> RecordedState:
    """Read state.json.

    Raises:
        UnreadableStateError: the file is missing, unreadable or damaged.
    """
    path = root / STATE_FILE
    try:
        content = load_json(read_regular(path))
        check_not_newer(str(path), content, STATE_VERSION)
        found = _STATE(normalise(relocate(content, path)))
    except OSError as error:
        raise UnreadableStateError(
            f"{path}: cannot be read: {error.strerror}", _hint(path, error)
        ) from None
    except NewerFormatError as error:
        raise UnreadableStateError(str(error), _UNKNOWN) from None
    except MismatchError as error:
        raise UnreadableStateError(f"{path} is damaged: {error}", _UNKNOWN) from None
    except ValueError:
        raise UnreadableStateError(f"{path} is damaged: it is not valid JSON", _UNKNOWN) from None
    names = {field.name for field in dataclasses.fields(RecordedState)}
    return RecordedState(**{name: value for name, value in found.items() if name in names})


_UNKNOWN = "the state of the run is unknown; its logs and checkpoints are in the same folder"


def _hint(path: Path, error: OSError) -> str:
    if not isinstance(error, PermissionError):
        return _UNKNOWN
    owner = find_owner(path.parent)
    return f"the run belongs to {owner}: ask {owner} for read permission on {path.parent}"


def is_watched(root: Path) -> bool:
    """Whether the run has a living supervisor, which holds the lock until it ends.

    Raises:
        UnreadableStateError: the lock file cannot be read.
    """
    path = root / LOCK_FILE
    try:
        return is_held(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnreadableStateError(
            f"{path}: cannot be read: {error.strerror}", _hint(path, error)
        ) from None


def find_supervisor(root: Path) -> int | None:
    """Return the process id in the supervisor's lock file, or None."""
    try:
        return int(read_regular(root / LOCK_FILE, _PID_BYTES))
    except (OSError, ValueError):
        return None


def is_held(lock: Path) -> bool:
    """Whether a living process holds a lock file. The test takes a shared lock, which needs no write permission.

    Raises:
        OSError: the file does not exist or cannot be opened.
    """
    with open_regular(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
