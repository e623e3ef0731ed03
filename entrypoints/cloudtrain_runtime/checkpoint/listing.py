"""The checkpoints in a folder: which are complete, and which are not and why. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloudtrain_runtime.checkpoint.storage import WRITER_FILE, Storage
from cloudtrain_runtime.contract.checkpoint_folder import (
    judge_checkpoint,
    read_object,
    step_of_folder,
)
from cloudtrain_runtime.contract.json_checks import MismatchError
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    Manifest,
    check_run_id,
)
from cloudtrain_runtime.contract.saved_checkpoint import (
    SavedCheckpoint,
    age_order,
)
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointRecord(SavedCheckpoint):
    """A stored checkpoint with its manifest.

    It is `complete` if every file exists with the right size, and `unfinished` if its manifest was never written.
    """

    # None if there is no readable one
    manifest: Manifest | None = None

    @property
    def content(self) -> Manifest:
        """The manifest, which a complete checkpoint has."""
        if self.manifest is None:
            raise CheckpointError(f"{self.uri} has no manifest")
        return self.manifest

    @property
    def location(self) -> str:
        """Uri of the folder with the checkpoint."""
        return self.uri.removesuffix(f"/{self.name}")

    def may_belong_to(self, run: str) -> bool:
        """Return whether its manifest names this run; an empty string means any run."""
        return not run or (self.manifest is not None and self.manifest.run == run)


def list_checkpoints(storage: Storage) -> list[CheckpointRecord]:
    """Return the checkpoints of a storage, oldest first."""
    found = [_examine(storage, folder, files) for folder, files in storage.folders().items()]
    return sorted(found, key=lambda record: age_order(record.step, record.time))


def mark_damaged(storage: Storage, folder: str, details: Iterable[str]) -> None:
    """Mark a checkpoint as damaged, so that it is never used again. It is not deleted."""
    storage.write(folder, DAMAGED_FILE, dump_json({"why": list(details)}, indent=1).encode())


def _examine(storage: Storage, folder: str, files: Mapping[str, int]) -> CheckpointRecord:
    step = step_of_folder(folder) or 0
    judged = judge_checkpoint(storage, folder, files)
    manifest = judged.manifest
    # A checkpoint without a readable manifest names its run in the writer's file.
    run = manifest.run if manifest else _writing_run(storage, folder)
    return CheckpointRecord(
        step=step,
        name=folder,
        uri=f"{storage.uri}/{folder}",
        state=judged.state,
        why=judged.why,
        bytes=sum(files.values()),
        files=len(files),
        run=run or None,
        time=manifest.time if manifest else None,
        world_size=manifest.world_size if manifest else None,
        torch=manifest.torch if manifest else None,
        manifest=manifest,
    )


def _writing_run(storage: Storage, folder: str) -> str:
    """Return the run in the identity of a checkpoint's writer, or an empty string."""
    try:
        return check_run_id(read_object(storage.read(folder, WRITER_FILE)).get("run", ""))
    except MismatchError:
        return ""
