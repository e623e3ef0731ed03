"""Checkpoints that an attached trainer keeps in its own format: names, and the list of their files. Without torch.

`checkpoint-500/` holds the trainer's files, and `cloudtrain.json`, which in the end lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.contract.json_checks import ObjectSchema, array, count, text
from cloudtrain_runtime.contract.saved_checkpoint import (
    COMPLETE,
    DAMAGED,
    UNFINISHED,
    SavedCheckpoint,
)
from cloudtrain_runtime.contract.strict_json import load_json

MARKER: Final = "cloudtrain.json"

_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)
_FILE = ObjectSchema({"path": text, "fingerprints": array(array(count))})
_SCHEMA = ObjectSchema({"run": text, "step": count, "files": array(_FILE)})


@dataclass(frozen=True)
class Marker:
    """What a checkpoint's list says.

    Attributes:
        run: The run that wrote the checkpoint.
        files: Fingerprints by file, each a size in bytes and a checksum. Several hosts may have written files of one
            name; any of them may be the one here.
    """

    run: str
    files: Mapping[str, list[list[int]]]


def step_of_trainer_folder(name: str) -> int | None:
    """Return the step of a checkpoint's folder, or None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def parse_marker(content: bytes | None) -> Marker | None:
    """Return the list in `cloudtrain.json`; None without a valid one."""
    try:
        found = _SCHEMA(load_json(content or b""))
    except ValueError:
        return None
    return Marker(found["run"], {file["path"]: file["fingerprints"] for file in found["files"]})


def list_trainer_checkpoints(storage: Storage) -> list[SavedCheckpoint]:
    """Return the checkpoints of attached trainers in a storage, oldest first. Sizes are compared, not content."""
    found = []
    for name, files in storage.folders(_NAME).items():
        marker = parse_marker(storage.read(name, MARKER)) if MARKER in files else None
        state, why = _judge(marker, files)
        found.append(
            SavedCheckpoint(
                step=step_of_trainer_folder(name) or 0,
                name=name,
                uri=f"{storage.uri}/{name}",
                state=state,
                why=why,
                bytes=sum(files.values()),
                files=len(files),
                run=None if marker is None else marker.run or None,
            )
        )
    return sorted(found, key=lambda each: each.step)


def _judge(marker: Marker | None, files: Mapping[str, int]) -> tuple[str, str]:
    if marker is None:
        return (
            UNFINISHED,
            f"it has no {MARKER} with a list of files, which an attached trainer writes last",
        )
    for name, fingerprints in sorted(marker.files.items()):
        if name not in files:
            return DAMAGED, f"{name} is missing"
        sizes = [size for size, *_ in filter(None, fingerprints)]
        if files[name] not in sizes:
            return (
                DAMAGED,
                f"{name} has {files[name]} bytes instead of {sizes[0] if sizes else 'a known size'}",
            )
    return COMPLETE, ""
