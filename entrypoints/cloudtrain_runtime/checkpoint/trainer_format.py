"""Checkpoints that an attached trainer keeps in its own format: names, and the list of their files. Without torch.

`checkpoint-500/` holds the trainer's files, and `cloudtrain.json`, which in the end lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.contract.checkpoint_folder import read_object
from cloudtrain_runtime.contract.json_checks import MismatchError, ObjectSchema, array, count, text
from cloudtrain_runtime.contract.saved_checkpoint import (
    COMPLETE,
    DAMAGED,
    UNFINISHED,
    SavedCheckpoint,
    age_order,
    size_mismatches,
)

MARKER: Final = "cloudtrain.json"

_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)
_FILE = ObjectSchema({"path": text, "fingerprints": array(array(count))})
_SCHEMA = ObjectSchema({"run": text, "step": count, "files": array(_FILE)})


@dataclass(frozen=True)
class Marker:
    """What `cloudtrain.json` says.

    Attributes:
        run: The run that writes or wrote the checkpoint; empty if it is unknown.
        step: Its step; None without a list of files.
        files: Fingerprints by file, each a size in bytes and a checksum. Several hosts may have written files of one
            name; any of them may be the one here. None without a valid list: the checkpoint is not finished.
    """

    run: str = ""
    step: int | None = None
    files: Mapping[str, list[list[int]]] | None = None

    def mismatches(self, name: str, sizes: Mapping[str, int]) -> list[str]:
        """Return why the files in a folder of this name, with these sizes in bytes, are not those of the list."""
        possible = {
            path: [size for size, *_ in filter(None, fingerprints)]
            for path, fingerprints in (self.files or {}).items()
        }
        wrong = size_mismatches(possible, sizes)
        if self.step != step_of_trainer_folder(name):
            wrong.append(f"{MARKER} is of step {self.step}")
        return wrong


def step_of_trainer_folder(name: str) -> int | None:
    """Return the step of a checkpoint's folder, or None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def parse_marker(content: bytes | None) -> Marker | None:
    """Return what `cloudtrain.json` says; None if there is none. What is not valid in it is unknown."""
    if content is None:
        return None
    found = read_object(content)
    try:
        listed = _SCHEMA(found)
    except MismatchError:
        run = found.get("run")
        return Marker(run if isinstance(run, str) else "")
    files = {file["path"]: file["fingerprints"] for file in listed["files"]}
    return Marker(listed["run"], listed["step"], files)


def list_trainer_checkpoints(storage: Storage) -> list[SavedCheckpoint]:
    """Return the checkpoints of attached trainers in a storage, oldest first. Sizes are compared, not content."""
    found = []
    for name, files in storage.folders(step_of_trainer_folder).items():
        marker = None
        if MARKER in files:
            marker = parse_marker(storage.read(name, MARKER))
        state, why = _judge(marker, name, files)
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
    return sorted(found, key=lambda each: age_order(each.step, each.time))


def _judge(marker: Marker | None, name: str, sizes: Mapping[str, int]) -> tuple[str, str]:
    if marker is None or marker.files is None:
        why = f"it has no {MARKER} with a list of files, which an attached trainer writes last"
        return UNFINISHED, why
    wrong = marker.mismatches(name, sizes)
    return DAMAGED if wrong else COMPLETE, "; ".join(wrong)
