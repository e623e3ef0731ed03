"""Which checkpoints of a folder are complete, and which is the newest: one rule for runtime, plan and `check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from cloudtrain_runtime.contract.format_version import NewerFormatError
from cloudtrain_runtime.contract.json_checks import normalise
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    Manifest,
    step_of_folder_name,
)
from cloudtrain_runtime.contract.saved_checkpoint import (
    COMPLETE,
    DAMAGED,
    UNFINISHED,
    UNREADABLE,
    age_order,
)
from cloudtrain_runtime.contract.strict_json import load_json

WRITING_PREFIX = ".writing-"
"""Begins the name of a checkpoint's folder until all ranks have written their files."""


class CheckpointStore(Protocol):
    """Reads a folder of checkpoints, on this machine or in S3."""

    def folders(self) -> Mapping[str, Mapping[str, int]]:
        """Return the sizes in bytes of the files of each checkpoint, by the name of its folder."""

    def read(self, folder: str, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file."""


@dataclass(frozen=True)
class Judgement:
    """What a checkpoint's files say about it.

    Attributes:
        manifest: Its manifest; None if there is no readable one.
        state: `complete`, `unfinished`, `damaged`, or `unreadable` if a newer cloudtrain has written it.
        why: Why it is not complete; otherwise empty.
    """

    manifest: Manifest | None
    state: str
    why: str = ""


def step_of_folder(folder: str) -> int | None:
    """Return the step of a checkpoint's folder, also of one that is still written, or None for another name."""
    return step_of_folder_name(folder.removeprefix(WRITING_PREFIX))


def judge_checkpoint(store: CheckpointStore, folder: str, sizes: Mapping[str, int]) -> Judgement:
    """Return whether a checkpoint is complete: its manifest is valid, and every other file has the size in it.

    Args:
        store: Where the checkpoint is.
        folder: The name of its folder.
        sizes: The sizes of its files in bytes.
    """
    if MANIFEST_FILE not in sizes or folder.startswith(WRITING_PREFIX):
        return Judgement(None, UNFINISHED, "it was never finished")
    text = store.read(folder, MANIFEST_FILE)
    if text is None:
        # It was deleted since it was listed.
        return Judgement(None, UNFINISHED, "it is being deleted")
    try:
        manifest = Manifest.from_json(text)
    except NewerFormatError as error:
        return Judgement(None, UNREADABLE, str(error))
    except ValueError as error:
        return Judgement(None, DAMAGED, str(error))
    if DAMAGED_FILE in sizes:
        wrong = _reasons(store.read(folder, DAMAGED_FILE))
    else:
        wrong = manifest.file_mismatches(sizes)
        if manifest.step != step_of_folder(folder):
            wrong.append(f"{MANIFEST_FILE} is of step {manifest.step}")
    return Judgement(manifest, DAMAGED if wrong else COMPLETE, "; ".join(wrong))


def complete_manifests(store: CheckpointStore) -> Iterator[Manifest]:
    """Yield the manifests of the complete checkpoints, newest first. Manifests are read as far as needed."""
    folders = store.folders()
    names = [
        name
        for name, sizes in folders.items()
        if step_of_folder(name) is not None and DAMAGED_FILE not in sizes
    ]
    by_step = sorted(names, key=lambda name: step_of_folder(name) or 0, reverse=True)
    for _, same_step in groupby(by_step, key=step_of_folder):
        judged = [judge_checkpoint(store, name, folders[name]) for name in same_step]
        complete = [
            each.manifest for each in judged if each.manifest is not None and each.state == COMPLETE
        ]
        yield from sorted(complete, key=lambda each: age_order(each.step, each.time), reverse=True)


def _reasons(text: bytes | None) -> list[str]:
    """Return why a checkpoint was marked as damaged."""
    why = normalise(read_object(text).get("why"))
    if isinstance(why, list) and why:
        return list(map(str, why))
    return ["it was marked as damaged"]


def read_object(text: bytes | None) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file; empty if there is none."""
    try:
        content = load_json(text or b"{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
