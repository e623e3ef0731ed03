"""The checkpoints in a folder: which are complete, which are not and why, and which are expired. Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cloudtrain_runtime.checkpoint.storage import WRITER_FILE, Storage, step_of_folder
from cloudtrain_runtime.contract.json_checks import MismatchError, normalise
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    Manifest,
    best_steps,
    check_run_id,
)
from cloudtrain_runtime.contract.strict_json import dump_json

Verdict = Literal["complete", "unfinished", "damaged"]


@dataclass(frozen=True)
class CheckpointRecord:
    """One checkpoint's folder."""

    folder: str
    step: int  # optimizer steps done
    # `complete` (every file exists with the right size), `unfinished` (its manifest was never written) or `damaged`
    verdict: Verdict
    why: str  # why it is not complete, or an empty string
    manifest: Manifest | None  # its manifest, or None if there is no readable one
    files: Mapping[str, int]  # sizes of its files in bytes

    @property
    def is_complete(self) -> bool:
        """Whether a run can resume from it."""
        return self.verdict == "complete"

    def may_belong_to(self, run: str) -> bool:
        """Return whether its manifest names this run; an empty string means any run."""
        return not run or (self.manifest is not None and self.manifest.run == run)


def list_checkpoints(storage: Storage) -> list[CheckpointRecord]:
    """Return the checkpoints of a storage, oldest first."""
    found = [_judge(storage, folder, files) for folder, files in storage.folders().items()]
    return sorted(found, key=lambda record: (record.step, record.manifest.time if record.manifest else 0.0))


def writing_run(storage: Storage, record: CheckpointRecord) -> str:
    """Return the run that wrote a checkpoint, finished or not, or an empty string."""
    if record.manifest is not None:
        return record.manifest.run
    try:
        return check_run_id(_object(storage.read(record.folder, WRITER_FILE)).get("run", ""))
    except MismatchError:
        return ""


def expired_folders(storage: Storage, *, run: str, step: int, keep: int, state: Mapping[str, Any]) -> list[str]:
    """Return the folders to delete: complete checkpoints beyond those to keep, and older unfinished ones.

    Only folders that this run wrote are returned: another run's checkpoints are that run's to delete. Checkpoints newer
    than `step`, which was just saved with `state`, are ignored. Kept are:

    - damaged checkpoints, which may be all that is left of a run;
    - the checkpoint with the best weights, or with the next best when that one could not be saved.
    """
    records = [
        record for record in list_checkpoints(storage) if record.step <= step and writing_run(storage, record) == run
    ]
    steps = sorted({record.step for record in records if record.is_complete})
    kept = steps[-keep:]
    best = [each for each in best_steps(state) if each in steps][-1:]
    return [
        record.folder
        for record in records
        if record.verdict != "damaged"
        and kept
        and record.step < kept[0]
        and not (record.is_complete and record.step in best)
    ]


def mark_damaged(storage: Storage, folder: str, details: Iterable[str]) -> None:
    """Mark a checkpoint as damaged, so that it is never used again. It is not deleted."""
    storage.write(folder, DAMAGED_FILE, dump_json({"why": list(details)}, indent=1).encode())


def _judge(storage: Storage, folder: str, files: Mapping[str, int]) -> CheckpointRecord:
    step = step_of_folder(folder) or 0
    if MANIFEST_FILE not in files or folder.startswith("."):
        return CheckpointRecord(folder, step, "unfinished", "it was never finished", None, files)
    text = storage.read(folder, MANIFEST_FILE)
    if text is None:  # deleted since it was listed
        return CheckpointRecord(folder, step, "unfinished", "it is being deleted", None, files)
    try:
        manifest = Manifest.from_json(text)
    except ValueError as error:
        return CheckpointRecord(folder, step, "damaged", str(error), None, files)
    if DAMAGED_FILE in files:
        why = normalise(_object(storage.read(folder, DAMAGED_FILE)).get("why"))
        why = why if isinstance(why, list) and why else ["it was marked as damaged"]
        return CheckpointRecord(folder, step, "damaged", "; ".join(map(str, why)), manifest, files)
    wrong = manifest.file_mismatches(files)
    if manifest.step != step:
        wrong.append(f"{MANIFEST_FILE} is of step {manifest.step}")
    if wrong:
        return CheckpointRecord(folder, step, "damaged", "; ".join(wrong), manifest, files)
    return CheckpointRecord(folder, step, "complete", "", manifest, files)


def _object(text: bytes | None) -> dict[str, Any]:
    try:
        content = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
