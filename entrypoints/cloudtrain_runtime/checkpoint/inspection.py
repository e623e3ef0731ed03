"""Inspection of a folder of checkpoints: list, verify and export. Listing needs no torch.

Run as a program (`python -m cloudtrain_runtime.checkpoint.inspection list URI`) it prints one JSON object per line:
progress events, and last a `result` or an `error`. A uri is a folder of checkpoints, or one checkpoint in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cloudtrain_runtime.checkpoint.listing import CheckpointRecord, list_checkpoints, writing_run
from cloudtrain_runtime.checkpoint.storage import Storage, open_storage
from cloudtrain_runtime.checkpoint.trainer_format import list_trainer_checkpoints
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract.manifest import (
    MANIFEST_FILE,
    Manifest,
    best_steps,
    step_of_folder_name,
)
from cloudtrain_runtime.contract.saved_checkpoint import (
    COMPLETE,
    DAMAGED,
    UNFINISHED,
    UNREADABLE,
    SavedCheckpoint,
)
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

NOT_PARSED: Final = "only its bytes were compared: to parse them takes PyTorch, which is not installed here"

MODEL_PART: Final = "model"
_MODEL_KEYS: Final = f"{MODEL_PART}."
_READERS: Final = 8
"""Files that are read at the same time."""

Emit = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class _Read:
    """An entry with its manifest, which a complete one has."""

    entry: SavedCheckpoint
    manifest: Manifest | None = None


class Inspection:
    """The checkpoints at a uri.

    Args:
        uri: Folder of checkpoints, or one checkpoint in it.
    """

    def __init__(self, uri: str) -> None:
        parent, _, name = uri.rstrip("/").rpartition("/")
        self._only = name if step_of_folder_name(name) is not None else None
        self.storage: Storage = open_storage(parent if self._only else uri)
        self._read = self._look()

    def _look(self) -> tuple[_Read, ...]:
        found = [
            _Read(self._entry(record), record.manifest) for record in list_checkpoints(self.storage) if record.files
        ]
        found.sort(key=lambda read: (read.entry.step, read.entry.time or 0.0), reverse=True)
        best = _best_of_runs(found)
        return tuple(replace(read, entry=replace(read.entry, best=read.entry in best)) for read in found)

    @property
    def entries(self) -> tuple[SavedCheckpoint, ...]:
        """The checkpoints that the uri names, newest step first."""
        return tuple(read.entry for read in self._read if self._only in (None, read.entry.name))

    def of_trainers(self) -> tuple[SavedCheckpoint, ...]:
        """Return the checkpoints that attached trainers keep in their own format, newest step first."""
        return () if self._only else tuple(reversed(list_trainer_checkpoints(self.storage)))

    def _entry(self, record: CheckpointRecord) -> SavedCheckpoint:
        manifest = record.manifest
        return SavedCheckpoint(
            step=record.step,
            name=record.folder,
            uri=f"{self.storage.uri}/{record.folder}",
            state=record.verdict,
            why=record.why,
            bytes=sum(record.files.values()),
            files=len(record.files),
            run=writing_run(self.storage, record) or None,
            time=manifest.time if manifest else None,
            world_size=manifest.world_size if manifest else None,
            torch=manifest.torch if manifest else None,
        )

    def find(self, step: int | None = None, run: str = "") -> SavedCheckpoint:
        """Return the newest complete checkpoint.

        Args:
            step: Of this step only.
            run: Of this run only, where several share the folder.

        Raises:
            CheckpointError: there is none; the message names the nearest existing ones.
        """
        own = [entry for entry in self.entries if run in ("", entry.run)]
        fitting = [entry for entry in own if entry.state == COMPLETE and step in (None, entry.step)]
        if not fitting:
            raise CheckpointError(self._why_none(step, run, own))
        return fitting[0]

    def _why_none(self, step: int | None, run: str, own: Sequence[SavedCheckpoint]) -> str:
        whose = f" of {run}" if run else ""
        asked = step if step is not None else step_of_folder_name(self._only) if self._only else None
        there = [read.entry for read in self._read if read.entry.state == COMPLETE]
        mine = [entry for entry in there if run in ("", entry.run)]
        if asked is None:
            others = sorted({str(entry.run) for entry in there if entry not in mine})
            why = f"; those there are of {', '.join(others)}" if others else f"; {_describe(own[0])}" if own else ""
            return f"there is no complete checkpoint{whose} at {self.storage.uri}{why}"
        of_step = [entry for entry in own if entry.step == asked]
        others = sorted({str(entry.run) for entry in there if entry.step == asked and entry not in mine})
        why = (
            f"; {_describe(of_step[0])}" if of_step else f"; that of {', '.join(others)} is another's" if others else ""
        )
        nearest = _nearest(asked, [entry.step for entry in mine])
        near = f"; the nearest complete: {' and '.join(map(str, nearest))}" if nearest else "; none is complete"
        return f"there is no complete checkpoint of step {asked}{whose} at {self.storage.uri}{why}{near}"

    def verify(self, emit: Emit, step: int | None = None) -> tuple[SavedCheckpoint, ...]:
        """Compare every block of the checkpoints with the manifest, and parse what a load parses. Nothing is changed.

        Args:
            emit: Callback with progress events: bytes read and total bytes.
            step: Only those of this step.

        Returns:
            The checkpoints with their new state, newest first, without those that the run has deleted meanwhile.

        Raises:
            CheckpointError: there is none.
        """
        asked = [read for read in self._read if read.entry in self.entries and step in (None, read.entry.step)]
        if not any(read.entry.state != UNFINISHED for read in asked):
            self.find(step)
        complete = {
            read.entry.name: read.manifest
            for read in asked
            if read.entry.state == COMPLETE and read.manifest is not None
        }
        progress = _Progress(emit, sum(manifest.total_bytes for manifest in complete.values()))
        with ThreadPoolExecutor(_READERS) as pool:
            work = {name: self._start(pool, name, manifest, progress) for name, manifest in complete.items()}
            done = [self._verified(read, work.get(read.entry.name, {})) for read in asked]
        return tuple(entry for entry in done if entry is not None)

    def _start(
        self, pool: ThreadPoolExecutor, name: str, manifest: Manifest, progress: _Progress
    ) -> dict[str, Future[list[str]]]:
        def check(file: str) -> list[str]:
            found = list(find_damage(self.storage, name, {file: manifest.files[file]}, manifest.block_bytes))
            progress.add(manifest.files[file].bytes)
            return found

        largest_first = sorted(manifest.files, key=lambda file: -manifest.files[file].bytes)
        return {file: pool.submit(check, file) for file in largest_first}

    def _verified(self, read: _Read, work: Mapping[str, Future[list[str]]]) -> SavedCheckpoint | None:
        entry = read.entry
        failed = [error for future in work.values() if (error := future.exception()) is not None]
        found = [fault for file in sorted(work) if work[file].exception() is None for fault in work[file].result()]
        if (failed or found) and self.storage.read(entry.name, MANIFEST_FILE) is None:
            return None  # deleted while it was read
        if failed:
            raise failed[0]
        if found:
            return replace(entry, state=DAMAGED, why="; ".join(found))
        if entry.state != COMPLETE or read.manifest is None:
            return entry
        return self._parsed(entry, read.manifest)

    def _parsed(self, entry: SavedCheckpoint, manifest: Manifest) -> SavedCheckpoint:
        """Return an entry with intact bytes, with its state after parsing what a load parses."""
        if importlib.util.find_spec("torch") is None:
            return replace(entry, why=NOT_PARSED)
        from cloudtrain_runtime.checkpoint.shards import CheckpointReader

        try:
            CheckpointReader(self.storage, entry.name, manifest).check()
        except CheckpointError as error:
            return replace(entry, state=UNREADABLE, why=str(error))
        except DamagedError as error:
            return replace(entry, state=DAMAGED, why=str(error))
        return entry

    def load(self, entry: SavedCheckpoint) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the tensors and other entries of a checkpoint by their full names, and the state in its manifest."""
        manifest = self._manifest(entry)
        return self._load(entry, "all")[0], manifest.state if manifest is not None else {}

    def _manifest(self, entry: SavedCheckpoint) -> Manifest | None:
        return next(read.manifest for read in self._read if read.entry == entry)

    def _load(self, entry: SavedCheckpoint, part: str) -> tuple[dict[str, Any], Metadata]:
        return _load(self.storage, entry, self._manifest(entry), part)

    def export(self, entry: SavedCheckpoint, target: Path, *, form: str, part: str) -> dict[str, Any]:
        """Write a checkpoint's tensors, unsharded, into one file, which appears when it is complete.

        One process holds all tensors in memory, whatever the number of ranks that wrote them.

        Args:
            entry: A complete checkpoint.
            target: The file.
            form: `safetensors`, which holds tensors only, or `torch`.
            part: `model`, or `all` for the complete checkpoint.

        Raises:
            CheckpointError: it holds no model.
            DamagedError: its bytes are not those that were written.
        """
        state, metadata = self._load(entry, part)
        import torch

        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        skipped = sorted(set(state) - set(tensors)) if form == "safetensors" else []
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            if form == "safetensors":
                from safetensors.torch import save_file

                about = {"format": "pt", "run": entry.run or "", "step": str(entry.step)}
                save_file(_of_part(tensors, part), str(partial), metadata=about)
            else:
                torch.save(_of_part(state, part) if part == MODEL_PART else _nest(state, metadata), partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return {
            "path": str(target),
            "bytes": target.stat().st_size,
            "tensors": len(tensors),
            "elements": sum(tensor.numel() for tensor in tensors.values()),
            "skipped": skipped,
        }


def _best_of_runs(found: Iterable[_Read]) -> list[SavedCheckpoint]:
    """Return for each run the complete checkpoint that its newest one names as the best, newest first."""
    complete = [read for read in found if read.entry.state == COMPLETE and read.manifest is not None]
    newest: dict[str | None, Manifest] = {}
    for read in complete:
        if read.manifest is not None:
            newest.setdefault(read.entry.run, read.manifest)
    steps = {run: best_steps(manifest.state) for run, manifest in newest.items()}
    best: dict[str | None, SavedCheckpoint] = {}
    for read in complete:
        if read.entry.step in steps[read.entry.run]:
            best.setdefault(read.entry.run, read.entry)
    return list(best.values())


def _describe(entry: SavedCheckpoint) -> str:
    return f"{entry.name} is {entry.state}: {entry.why}"


def _nearest(step: int, steps: Iterable[int]) -> list[int]:
    """Return the next lower and the next higher step, if they exist."""
    lower = [other for other in steps if other < step]
    higher = [other for other in steps if other > step]
    return [*([max(lower)] if lower else []), *([min(higher)] if higher else [])]


class _Progress:
    """Emits the number of bytes read. Thread-safe."""

    def __init__(self, emit: Emit, total: int) -> None:
        self._emit = emit
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._emit({"event": "progress", "done": self._done, "total": self._total})


def _load(
    storage: Storage, entry: SavedCheckpoint, manifest: Manifest | None, part: str
) -> tuple[dict[str, Any], Metadata]:
    """Return the entries of a part by their full names, read by one process without a process group."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from cloudtrain_runtime.checkpoint.shards import CheckpointReader, PlainLoadPlanner

    if manifest is None:
        raise CheckpointError(f"{entry.uri} has no manifest")
    reader = CheckpointReader(storage, entry.name, manifest)
    metadata = reader.read_metadata()
    state = {
        name: _room_for(stored)
        for name, stored in metadata.state_dict_metadata.items()
        if part != MODEL_PART or name.startswith(_MODEL_KEYS)
    }
    if not state:
        raise CheckpointError(f"{entry.uri} holds no model: none of its keys begins with {_MODEL_KEYS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns about the single process, which is intended
            load(state, storage_reader=reader, planner=PlainLoadPlanner())
    except CheckpointException as error:
        raise next((cause for cause, _ in error.failures.values()), error) from None
    return state, metadata


def _room_for(stored: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return None  # an object, which the planner stores here


def _of_part(state: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name.removeprefix(_MODEL_KEYS) if part == MODEL_PART else name: value for name, value in state.items()}


def _nest(state: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Return entries nested as they were saved, along the paths that DCP has recorded."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    nested: dict[Any, Any] = {}
    for name, value in state.items():
        *outer, last = paths.get(name, (name,))
        level = nested
        for key in outer:
            level = level.setdefault(key, {})
        level[last] = value
    return nested


def main(argv: Sequence[str], emit: Emit) -> int:
    """Run the command line; return 0, or 1 if an error was reported."""
    arguments = _parse(argv)
    try:
        emit({"event": "result", **_answer(arguments, emit)})
    except CheckpointError as error:
        emit({"event": "error", "kind": "input", "message": str(error)})
    except DamagedError as error:
        emit({"event": "error", "kind": "damaged", "message": str(error)})
    except OSError as error:
        emit({"event": "error", "kind": "storage", "message": str(error) or type(error).__name__})
    else:
        return 0
    return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cloudtrain_runtime.checkpoint.inspection")
    parser.add_argument("verb", choices=("list", "find", "verify", "export"))
    parser.add_argument("uri")
    parser.add_argument("--step", type=int)
    parser.add_argument("--run", default="")
    parser.add_argument("--to", choices=("safetensors", "torch"), default="torch")
    parser.add_argument("--part", choices=(MODEL_PART, "all"), default=MODEL_PART)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def _answer(arguments: argparse.Namespace, emit: Emit) -> dict[str, Any]:
    found = Inspection(arguments.uri)
    if arguments.verb == "list":
        return {"checkpoints": [asdict(entry) for entry in (*found.entries, *found.of_trainers())]}
    if arguments.verb == "verify":
        return {"checkpoints": [asdict(entry) for entry in found.verify(emit, arguments.step)]}
    entry = found.find(arguments.step, arguments.run)
    if arguments.verb == "find":
        return {"checkpoint": asdict(entry)}
    exported = found.export(entry, arguments.output, form=arguments.to, part=arguments.part)
    return {"checkpoint": asdict(entry), **exported}


def _print(event: Mapping[str, Any]) -> None:
    print(dump_json(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _print))
