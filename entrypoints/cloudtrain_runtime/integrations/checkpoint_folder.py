"""Checkpoints in a framework's own format below /opt/ml/checkpoints: which of them are complete, and which to keep.

`checkpoint-500/` holds the framework's files, and `cloudtrain.json`: at first a mark with the run, in the end with the
list of all files. SageMaker copies the files to S3 and back in any order, so a checkpoint counts only if all files of
its list are there unchanged. A folder without `cloudtrain.json` is another program's, and never deleted or replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cloudtrain_runtime.checkpoint.storage import FolderStorage
from cloudtrain_runtime.checkpoint.trainer_format import (
    MARKER,
    Marker,
    list_trainer_checkpoints,
    parse_marker,
    step_of_trainer_folder,
)
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.contract.machine_paths import machine_path
from cloudtrain_runtime.contract.saved_checkpoint import UNFINISHED, oldest_kept
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

T = TypeVar("T")

_BLOCKS = 16
_BLOCK_BYTES = 65_536
_CHUNK_BYTES = 16 * 2**20


class CheckpointFolder:
    """The checkpoints of one run. All ranks call `newest_step`, `prepare`, `begin` and `finish` together.

    Attributes:
        group: CPU process group of all ranks, to be set when they have joined; None for one rank.

    Args:
        context: This rank's context.
        config: The job's checkpoint section.
        is_copied: Whether every host gets all files. Otherwise each has those that its ranks wrote, until the next run.
    """

    def __init__(
        self, context: Context, config: CheckpointConfig, *, is_copied: bool = False
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self._context = context
        self._config = config
        self._is_copied = is_copied and len(context.hosts) > 1
        self._folder = context.checkpoint_dir
        self._storage = FolderStorage(self._folder)
        self._complete: set[int] = set()

    def path(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self._folder / f"checkpoint-{step}"

    def complete_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints on this host that this run may resume from, the newest last."""
        try:
            listed = list_trainer_checkpoints(self._storage)
        except OSError as error:
            message = f"the run does not start, because its checkpoints cannot be listed: {error}"
            raise CheckpointError(message) from None
        self._complete = set()
        for each in listed:
            path = self.path(each.step)
            is_usable = self._is_usable(each.run or "")
            if is_usable and each.is_complete and _is_intact(path, self._marker(each.step)):
                self._complete.add(each.step)
            elif self._context.is_main and (is_usable or each.state == UNFINISHED):
                log_line(f"{path} is not complete: it is not used")
        return sorted(self._complete)

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint that is complete on every host, or None."""
        by_rank = self._gather(self.complete_steps())
        return max(set.intersection(*map(set, by_rank)), default=None)

    def prepare(self, start: int) -> None:
        """Delete what an earlier attempt has saved after the step that this run starts from.

        Raises:
            CheckpointError: the folder has newer checkpoints of a run that this one does not continue.
        """
        for step in self._steps():
            marker = self._marker(step) if step > start else None
            is_finished = marker is not None and marker.files is not None
            if marker is not None and is_finished and not self._is_usable(marker.run):
                raise CheckpointError(
                    f"checkpoint.resume is {self._config.resume}, and {self._folder} has step {step} of run "
                    f"{marker.run}, which this run would overwrite. What to do: give the run a folder of its own with "
                    "checkpoint.uri, or resume from that run"
                )
        # No rank deletes files that another has not checked yet.
        by_rank = self._gather(self._complete)
        self._complete = {step for step in set.intersection(*by_rank) if step <= start}
        if self._context.local_rank == 0:
            for step in self._steps():
                if step > start and self._is_ours(step):
                    shutil.rmtree(self.path(step))
        self._gather(None)

    def begin(self, step: int) -> None:
        """Mark the folder of a checkpoint before the framework writes to it.

        What another program has there is set aside, under another name.
        """
        if self._context.local_rank == 0:
            path = self.path(step)
            if self._marker(step) is None and path.is_dir() and any(path.iterdir()):
                names = (path.with_name(f"{path.name}.other-{n}") for n in itertools.count(1))
                aside = next(each for each in names if not each.exists())
                path.rename(aside)
                log_line(f"{path} was written by another program: it is kept as {aside.name}")
            _write_marker(path, {"run": self._context.run, "step": step})
        # No rank writes a file before.
        self._gather(None)

    def finish(self, step: int, *, kept: Collection[Path] = ()) -> None:
        """Mark a checkpoint as complete when all ranks have written it, and delete old ones beyond `checkpoint.keep`.

        Args:
            step: Its step.
            kept: Further checkpoints that are not deleted.
        """
        self._gather(None)
        is_leader = self._context.local_rank == 0
        own = _fingerprints(self.path(step)) if is_leader else {}
        files: dict[str, list[list[int]]] = {}
        by_rank = self._gather(own)
        for found in by_rank:
            for name, fingerprint in found.items():
                if fingerprint not in files.setdefault(name, []):
                    files[name].append(fingerprint)
        if self._is_copied:
            for name, (fingerprint, *_) in sorted(files.items()):
                owner = next(rank for rank, found in enumerate(by_rank) if name in found)
                is_missing = is_leader and name not in own
                self._broadcast(
                    self.path(step) / name, fingerprint[0], owner, is_missing=is_missing
                )
            self._gather(None)
        self._complete.add(step)
        if is_leader:
            listed = [
                {"path": name, "fingerprints": found} for name, found in sorted(files.items())
            ]
            _write_marker(
                self.path(step), {"run": self._context.run, "step": step, "files": listed}
            )
            self._delete_expired(step, kept)
        if self._context.is_main:
            size = sum(fingerprint[0] for each in files.values() for fingerprint in each[:1])
            place = machine_path(self.path(step), os.environ).resolve()
            emit("checkpoint", uri=place.as_uri(), step=step, bytes=size)

    def _delete_expired(self, newest: int, kept: Collection[Path]) -> None:
        oldest = oldest_kept((step for step in self._complete if step <= newest), self._config.keep)
        protected = {path.resolve() for path in kept}
        old = [step for step in self._steps() if oldest is not None and step < oldest]
        try:
            for step in old:
                if self._is_expired(step) and self.path(step).resolve() not in protected:
                    self._complete.discard(step)
                    shutil.rmtree(self.path(step))
        except OSError as error:
            log_line(f"older checkpoints are not deleted now: {error}")

    def _is_expired(self, step: int) -> bool:
        """Return whether an old checkpoint may go: a finished one that is damaged may be all that is left of a run."""
        marker = self._marker(step)
        is_unfinished = marker is not None and marker.files is None
        return self._is_ours(step) and (is_unfinished or step in self._complete)

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        steps = [
            step_of_trainer_folder(path.name) for path in self._folder.iterdir() if path.is_dir()
        ]
        return sorted(step for step in steps if step is not None)

    def _is_ours(self, step: int) -> bool:
        """Return whether this run may delete the folder of a step: it has the mark of this run, or of its origin."""
        marker = self._marker(step)
        return marker is not None and (marker.run == "" or self._is_usable(marker.run))

    def _marker(self, step: int) -> Marker | None:
        return parse_marker(self._storage.read(self.path(step).name, MARKER))

    def _is_usable(self, run: str) -> bool:
        if self._config.resume == "never":
            return run == self._context.run
        return not self._config.resume_run or run in (self._config.resume_run, self._context.run)

    def _gather(self, value: T) -> list[T]:
        return gather(value, self._context, self.group)

    def _broadcast(self, path: Path, size: int, owner: int, *, is_missing: bool) -> None:
        """Copy a file from the host of one rank to the hosts that do not have it. All ranks call this together.

        Args:
            path: The file, on every host.
            size: Its size in bytes.
            owner: The rank that reads it.
            is_missing: Whether this rank writes it.
        """
        with contextlib.ExitStack() as files:
            opened = None
            copy = None
            if self._context.rank == owner:
                opened = files.enter_context(path.open("rb"))
            if is_missing:
                path.parent.mkdir(parents=True, exist_ok=True)
                copy = files.enter_context(path.open("wb"))
            for start in range(0, size, _CHUNK_BYTES):
                content = bytearray(min(_CHUNK_BYTES, size - start))
                if opened is not None:
                    opened.readinto(content)
                chunk = torch.frombuffer(content, dtype=torch.uint8)
                dist.broadcast(chunk, src=owner, group=self.group)
                if copy is not None:
                    copy.write(content)


def _fingerprints(folder: Path) -> dict[str, list[int]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    return {path.relative_to(folder).as_posix(): _fingerprint(path) for path in files}


def _fingerprint(path: Path) -> list[int]:
    """Return a file's size, and a checksum of blocks from all of it and of its end.

    Two saves of one step differ in most blocks, and archives of torch.save have checksums of their content at the end.
    """
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        for start in sorted(
            {size * block // _BLOCKS for block in range(_BLOCKS)} | {max(0, size - _BLOCK_BYTES)}
        ):
            file.seek(start)
            checksum = zlib.crc32(file.read(_BLOCK_BYTES), checksum)
    return [size, checksum]


def _is_intact(folder: Path, marker: Marker | None) -> bool:
    if marker is None or marker.files is None:
        return False
    try:
        return all(_fingerprint(folder / name) in found for name, found in marker.files.items())
    except OSError:
        return False


def _write_marker(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{MARKER}.part"
    part.write_text(dump_json(content), encoding="utf-8")
    part.replace(folder / MARKER)
