"""Inspection of a folder of checkpoints: list, verify, compare and export. Listing needs no torch.

Run as a program (`python -m cloudtrain_runtime.checkpoint.inspection list URI`) it prints one JSON object per line:
progress events, and last a `result` or an `error`. A uri is a folder of checkpoints, or one checkpoint in it.
"""

from __future__ import annotations

import argparse
import bisect
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cloudtrain_runtime.checkpoint.listing import CheckpointRecord, list_checkpoints
from cloudtrain_runtime.checkpoint.storage import Storage, open_storage
from cloudtrain_runtime.checkpoint.trainer_format import list_trainer_checkpoints
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract.manifest import MANIFEST_FILE, best_steps, step_of_folder_name
from cloudtrain_runtime.contract.saved_checkpoint import (
    DAMAGED,
    UNFINISHED,
    UNREADABLE,
    SavedCheckpoint,
)
from cloudtrain_runtime.contract.strict_json import dump_json, encode_floats
from cloudtrain_runtime.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

NOT_PARSED: Final = (
    "only its bytes were compared: to parse them takes PyTorch, which is not installed here"
)

MODEL_PART: Final = "model"
_MODEL_KEYS: Final = f"{MODEL_PART}."
_READERS: Final = 8
"""Files that are read at the same time."""

Emit = Callable[[Mapping[str, Any]], None]


class NothingSavedError(CheckpointError):
    """There is no checkpoint at all, not even a damaged one."""


class Inspection:
    """The checkpoints at a uri.

    Args:
        uri: Folder of checkpoints, or one checkpoint in it.

    Attributes:
        entries: The checkpoints that the uri names, newest step first.
    """

    def __init__(self, uri: str) -> None:
        parent, _, name = uri.rstrip("/").rpartition("/")
        self._only = name if step_of_folder_name(name) is not None else None
        self.storage: Storage = open_storage(parent if self._only else uri)
        oldest_first = [each for each in list_checkpoints(self.storage) if each.files]
        self._all = _with_best(tuple(reversed(oldest_first)))
        self.entries = tuple(each for each in self._all if self._only in (None, each.name))

    def of_trainers(self) -> tuple[SavedCheckpoint, ...]:
        """Return the checkpoints that attached trainers keep in their own format, newest step first."""
        if self._only:
            return ()
        return tuple(reversed(list_trainer_checkpoints(self.storage)))

    def find(self, step: int | None = None, run: str = "") -> CheckpointRecord:
        """Return the newest complete checkpoint.

        Args:
            step: Of this step only.
            run: Of this run only, where several share the folder.

        Raises:
            CheckpointError: there is none; the message names the nearest existing ones.
        """
        own = [entry for entry in self.entries if run in ("", entry.run)]
        # The entries have the newest step first.
        for entry in own:
            if entry.is_complete and step in (None, entry.step):
                return entry
        why = self._why_none(step, run, own)
        raise CheckpointError(why) if self._all else NothingSavedError(why)

    def _why_none(self, step: int | None, run: str, own: Sequence[CheckpointRecord]) -> str:
        if step is None and self._only:
            # The uri names one checkpoint, and so its step.
            step = step_of_folder_name(self._only)
        complete = [entry for entry in self._all if entry.is_complete]
        mine = [entry for entry in complete if run in ("", entry.run)]
        found = next((entry for entry in own if step in (None, entry.step)), None)
        # Another run may have saved this step in the same folder, so the number alone would mislead.
        others = {
            str(entry.run) for entry in complete if entry not in mine and step in (None, entry.step)
        }
        what = "" if step is None else f" of step {step}"
        whose = f" of {run}" if run else ""
        why = f"there is no complete checkpoint{what}{whose} at {self.storage.uri}"
        if found is not None:
            why += f"; {found.name} is {found.state}: {found.why}"
        elif others:
            why += f"; there are those of {', '.join(sorted(others))}"
        if step is not None:
            why += _nearest_complete(step, mine)
        return why

    def verify(self, emit: Emit, step: int | None = None) -> tuple[CheckpointRecord, ...]:
        """Compare every block of the checkpoints with the manifest, and parse what a load parses. Nothing is changed.

        Args:
            emit: Callback with progress events: bytes read and total bytes.
            step: Only those of this step.

        Returns:
            The checkpoints with their new state, newest first, without those that the run has deleted meanwhile.

        Raises:
            CheckpointError: there is none.
        """
        asked = [entry for entry in self.entries if step in (None, entry.step)]
        if all(entry.state == UNFINISHED for entry in asked):
            self.find(step)
        files = {
            entry.name: sorted(entry.content.files) if entry.is_complete else [] for entry in asked
        }
        total = sum(entry.content.total_bytes for entry in asked if entry.is_complete)
        done = 0
        verified = []
        with ThreadPoolExecutor(_READERS) as pool:
            work = {
                entry.name: [
                    pool.submit(self._find_damage, entry, file) for file in files[entry.name]
                ]
                for entry in asked
            }
            for entry in asked:
                damage: list[str] = []
                try:
                    for file, future in zip(files[entry.name], work[entry.name], strict=True):
                        damage += future.result()
                        done += entry.content.files[file].bytes
                        emit({"event": "progress", "done": done, "total": total})
                except OSError:
                    if not self._is_deleted(entry):
                        raise
                    continue
                if not damage:
                    verified.append(self._parsed(entry) if entry.is_complete else entry)
                elif not self._is_deleted(entry):
                    verified.append(replace(entry, state=DAMAGED, why="; ".join(damage)))
        return tuple(verified)

    def _find_damage(self, entry: CheckpointRecord, file: str) -> list[str]:
        content = entry.content
        stored = {file: content.files[file]}
        return list(find_damage(self.storage, entry.name, stored, content.block_bytes))

    def _is_deleted(self, entry: CheckpointRecord) -> bool:
        """Return whether a checkpoint was deleted while it was read."""
        return self.storage.read(entry.name, MANIFEST_FILE) is None

    def _parsed(self, entry: CheckpointRecord) -> CheckpointRecord:
        """Return an entry with intact bytes, with its state after parsing what a load parses."""
        if importlib.util.find_spec("torch") is None:
            return replace(entry, why=NOT_PARSED)
        from cloudtrain_runtime.checkpoint.shards import CheckpointReader

        try:
            CheckpointReader(self.storage, entry.name, entry.content).check()
        except CheckpointError as error:
            return replace(entry, state=UNREADABLE, why=str(error))
        except DamagedError as error:
            return replace(entry, state=DAMAGED, why=str(error))
        return entry

    def load(self, entry: CheckpointRecord) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the tensors and other entries of a checkpoint by their full names, and the state in its manifest."""
        return self._load(entry, "all")[0], entry.content.state

    def _load(self, entry: CheckpointRecord, part: str) -> tuple[dict[str, Any], Metadata]:
        """Return the entries of a part by their full names, read by one process without a process group."""
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        from cloudtrain_runtime.checkpoint.shards import CheckpointReader, PlainLoadPlanner

        reader = CheckpointReader(self.storage, entry.name, entry.content)
        metadata = reader.read_metadata()
        state: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if part == MODEL_PART and not name.startswith(_MODEL_KEYS):
                continue
            # The planner replaces None by an object, which is no tensor.
            state[name] = None
            if isinstance(stored, TensorStorageMetadata):
                state[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        if not state:
            raise CheckpointError(
                f"{entry.uri} holds no model: none of its keys begins with {_MODEL_KEYS}"
            )
        try:
            with warnings.catch_warnings():
                # DCP warns about the single process, which is intended.
                warnings.simplefilter("ignore")
                load(state, storage_reader=reader, planner=PlainLoadPlanner())
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            raise (causes[0] if causes else error) from None
        return state, metadata

    def export(
        self, entry: CheckpointRecord, target: Path, *, form: str, part: str
    ) -> dict[str, Any]:
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
        skipped: list[str] = []
        if form == "safetensors":
            skipped = sorted(set(state) - set(tensors))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            if form == "safetensors":
                from safetensors.torch import save_file

                about = {"format": "pt", "run": entry.run or "", "step": str(entry.step)}
                save_file(_of_part(tensors, part), str(partial), metadata=about)
            elif part == MODEL_PART:
                torch.save(_of_part(state, part), partial)
            else:
                torch.save(_nest(state, metadata), partial)
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


def _with_best(found: tuple[CheckpointRecord, ...]) -> tuple[CheckpointRecord, ...]:
    """Mark for each run the complete checkpoint that its newest one names as the best; `found` has the newest first."""
    steps: dict[str | None, list[int]] = {}
    best: dict[str | None, CheckpointRecord] = {}
    for entry in found:
        if not entry.is_complete:
            continue
        # The first complete checkpoint of a run is its newest one.
        if entry.run not in steps:
            steps[entry.run] = best_steps(entry.content.state)
        if entry.step in steps[entry.run]:
            best.setdefault(entry.run, entry)
    return tuple(replace(entry, best=best.get(entry.run) is entry) for entry in found)


def _nearest_complete(step: int, complete: Sequence[CheckpointRecord]) -> str:
    steps = sorted({entry.step for entry in complete} - {step})
    at = bisect.bisect(steps, step)
    nearest = steps[max(at - 1, 0) : at + 1]
    if not nearest:
        return "; none is complete"
    return f"; the nearest complete: {' and '.join(map(str, nearest))}"


def _of_part(state: Mapping[str, Any], part: str) -> dict[str, Any]:
    if part != MODEL_PART:
        return dict(state)
    return {name.removeprefix(_MODEL_KEYS): value for name, value in state.items()}


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


def main(argv: Sequence[str]) -> int:
    """Run the command line; return 0, or 1 if an error was reported."""
    try:
        _print({"event": "result", **_answer(_parse(argv))})
    except NothingSavedError as error:
        _print({"event": "error", "kind": "empty", "message": str(error)})
    except CheckpointError as error:
        _print({"event": "error", "kind": "input", "message": str(error)})
    except DamagedError as error:
        _print({"event": "error", "kind": "damaged", "message": str(error)})
    except OSError as error:
        _print({"event": "error", "kind": "storage", "message": str(error) or type(error).__name__})
    else:
        return 0
    return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cloudtrain_runtime.checkpoint.inspection")
    parser.add_argument("verb", choices=("list", "find", "verify", "export", "compare"))
    parser.add_argument("uri")
    parser.add_argument(
        "others", nargs="*", help="checkpoints that are compared with the first one"
    )
    parser.add_argument("--step", type=int)
    parser.add_argument("--run", default="")
    parser.add_argument("--to", choices=("safetensors", "torch"), default="torch")
    parser.add_argument("--part", choices=(MODEL_PART, "all"), default=MODEL_PART)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def _answer(arguments: argparse.Namespace) -> dict[str, Any]:
    found = Inspection(arguments.uri)
    if arguments.verb == "list":
        return {"checkpoints": [*map(_json, found.entries), *map(asdict, found.of_trainers())]}
    if arguments.verb == "verify":
        return {"checkpoints": [*map(_json, found.verify(_print, arguments.step))]}
    entry = found.find(arguments.step, arguments.run)
    if arguments.verb == "find":
        return {"checkpoint": _json(entry)}
    if arguments.verb == "compare":
        from cloudtrain_runtime.checkpoint.comparison import compare

        first = found.load(entry)
        others = map(Inspection, arguments.others)
        return {
            "differences": [
                encode_floats(compare(first, other.load(other.find()))) for other in others
            ]
        }
    exported = found.export(entry, arguments.output, form=arguments.to, part=arguments.part)
    return {"checkpoint": _json(entry), **exported}


def _json(entry: CheckpointRecord) -> dict[str, Any]:
    """Return the fields of a SavedCheckpoint."""
    content = asdict(replace(entry, manifest=None))
    del content["manifest"]
    return content


def _print(event: Mapping[str, Any]) -> None:
    print(dump_json(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
