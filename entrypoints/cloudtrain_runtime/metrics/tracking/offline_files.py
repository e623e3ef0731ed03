"""Offline files of a training in a durable place, each step in one of them, over stops, restarts and lost hosts.

Each attempt writes segments: a folder of the service's own files, which is copied when it is complete. Between
two segments, a state file has the values that no complete segment has yet; it is written when a checkpoint is complete.
So a host that is lost after a checkpoint leaves all values until that checkpoint, and the next attempt logs them first.

A copy takes two steps: the state names the segment, and then its main file is written last. An attempt that finds a
name without the file, or with it, knows whether the values are still to be logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract.json_checks import (
    MismatchError,
    ObjectSchema,
    array,
    count,
    integer,
    mapping,
    text,
    timestamp,
)
from cloudtrain_runtime.contract.strict_json import (
    decode_floats,
    dump_json,
    encode_floats,
    load_json,
)
from cloudtrain_runtime.metrics.tracking.tracker import Value, read_file, write_file

_STATE = ObjectSchema(
    {
        "logged": mapping(count),
        "row": integer,
        "copying": text,
        "pending": array(ObjectSchema({"name": text, "time": timestamp, "step": count})),
    }
)


@dataclass
class _State:
    """What complete segments have, and the values that they do not have yet.

    Attributes:
        logged: Last step in a complete segment, by metric.
        row: Last row in a complete segment; -1 before the first one.
        pending: Values that no complete segment has.
        copying: Main file of the segment that has the pending values, once it exists.
    """

    logged: dict[str, int] = field(default_factory=dict)
    row: int = -1
    pending: list[Value] = field(default_factory=list)
    copying: str = ""


class OfflineFiles:
    """The offline files of one training.

    Args:
        folder: Uri of their folder.
        name: Name of the state file, by the run of the service.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder.rstrip("/")
        self._state_uri = f"{self.folder}/{name}.json"
        self._state = _State()

    @property
    def row(self) -> int:
        """Last row in a complete segment; -1 before the first one."""
        return self._state.row

    @property
    def pending(self) -> list[Value]:
        """Values that no complete segment has, and that the next one begins with."""
        return list(self._state.pending)

    def load(self) -> dict[str, int]:
        """Read the state that an earlier attempt has left; return the last step by metric, with pending values."""
        content = read_file(self._state_uri)
        self._state = _State() if content is None else _parse(content)
        copying = self._state.copying
        if copying and read_file(f"{self.folder}/{copying}") is not None:
            self._complete()
        self._state.copying = ""
        return _newest(self._state.logged, self._state.pending)

    def add(self, values: Iterable[Value]) -> None:
        """Keep values that are logged to the present segment."""
        self._state.pending += values

    def save(self) -> None:
        """Write the state: values until now survive the loss of this host."""
        fields = asdict(self._state)
        fields["pending"] = [each._asdict() for each in self._state.pending]
        write_file(self._state_uri, dump_json(encode_floats(fields)).encode())

    def copy(self, segment: Path, main: str) -> None:
        """Copy a segment, which is complete.

        Args:
            segment: Its folder on this host.
            main: Name of its main file, which has the values.
        """
        self._state.copying = f"{segment.name}/{main}"
        self.save()
        # Not the logs of the service's package, which no command of it reads.
        others = [each for each in sorted((segment / "files").rglob("*")) if each.is_file()]
        for file in (*others, segment / main):
            name = file.relative_to(segment.parent).as_posix()
            write_file(f"{self.folder}/{name}", file.read_bytes())
        self._complete()
        self.save()

    def _complete(self) -> None:
        state = self._state
        state.logged = _newest(state.logged, state.pending)
        state.row = max([state.row, *(each.step for each in state.pending)])
        state.pending = []
        state.copying = ""


def _parse(content: bytes) -> _State:
    """Return the state in a file.

    Raises:
        ValueError: the file has another form.
    """
    try:
        fields: Any = decode_floats(load_json(content))
        values = [Value(**each) for each in fields["pending"]]
        _STATE(fields)
    except (MismatchError, KeyError, TypeError) as error:
        raise ValueError(f"the state of the offline files is damaged: {error}") from None
    return _State(fields["logged"], fields["row"], values, fields["copying"])


def _newest(logged: dict[str, int], values: Iterable[Value]) -> dict[str, int]:
    """Return the last step by metric, with values that are logged later."""
    found = dict(logged)
    for each in values:
        found[each.name] = max(found.get(each.name, -1), each.step)
    return found
