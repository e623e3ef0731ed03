"""What the offline files of Weights & Biases hold. The package has no public reader of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_HEADER_BYTES = 7
_LAST_PARTS = (1, 4)


@dataclass
class OfflineRun:
    """Rows by step, in the order of the files, with configuration, measurements of the host and exit codes."""

    ids: set[str] = field(default_factory=set)
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)
    exit_codes: list[int] = field(default_factory=list)
    resumes: set[bool] = field(default_factory=set)

    @property
    def steps(self) -> list[int]:
        """Steps of the rows, with those that are there twice."""
        return [step for step, _ in self.rows]

    def values(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step; each may be there once."""
        found = [(step, float(row[name])) for step, row in self.rows if name in row]
        assert len(found) == len(dict(found)), f"{name} twice at one step"
        return dict(found)


def read_offline(folder: Path) -> OfflineRun:
    """Return what all offline files below a folder hold."""
    found = OfflineRun()
    for file in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for record in _records(file.read_bytes()):
            _add(found, record)
    return found


def _add(found: OfflineRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found.ids.add(record.run.run_id)
        found.resumes.add(record.run.resume)
        found.config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
    elif kind == "config":
        found.config |= {each.key: json.loads(each.value_json) for each in record.config.update}
    elif kind == "history":
        row = {
            "/".join(each.nested_key) or each.key: json.loads(each.value_json)
            for each in record.history.item
        }
        found.rows.append((record.history.step.num, row))
    elif kind == "stats":
        found.measured |= {each.key for each in record.stats.item}
    elif kind == "exit":
        found.exit_codes.append(record.exit.exit_code)


def _records(content: bytes) -> Iterator[Any]:
    """Yield the records of a file: LevelDB's log format, with a header of 7 bytes before the first block's records."""
    from wandb.proto import wandb_internal_pb2

    at, part = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(content):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + _HEADER_BYTES])
        at += _HEADER_BYTES
        part += content[at : at + length]
        at += length
        if kind in _LAST_PARTS:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record
