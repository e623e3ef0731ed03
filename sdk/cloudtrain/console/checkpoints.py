"""Output about checkpoints and downloads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloudtrain.console import command_name, print_message
from cloudtrain.console.facts import print_sentence
from cloudtrain.console.tables import Cell, Column, print_table, run_cell
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.shown_places import shown_place
from cloudtrain.support.units import format_age, format_duration, format_size

if TYPE_CHECKING:
    from cloudtrain.runs.checkpoints import CheckpointFolder, ExportedCheckpoint, SavedCheckpoint
    from cloudtrain.runs.downloads import Download
    from cloudtrain.runs.file_transfer import CopiedFile


_COLUMNS = (
    Column("step", is_number=True),
    Column("state"),
    Column("age", drop=4),
    Column("size", is_number=True, drop=3),
    Column("ranks", is_number=True, drop=2),
    Column("torch", drop=1),
    Column("name"),
    Column("run", drop=5),
    Column("why", least=20),
)
_COLOURS = {"complete": "32", "complete, best": "32", "damaged": "1;31", "unreadable": "33"}


def print_checkpoints(found: Sequence[SavedCheckpoint], folder: CheckpointFolder) -> None:
    """Print checkpoints in columns; empty columns are left out."""
    if not found:
        from cloudtrain.runs.checkpoints import HOW_TO_SAVE

        print(f"no checkpoints at {shown_place(folder.uri)}")
        print_sentence(HOW_TO_SAVE, print_message)
        return
    print(found[0].uri.rpartition("/")[0])
    now = time.time()
    rows = [_row(each, now, own=folder.run) for each in found]
    print_table(_COLUMNS, rows, colours=_COLOURS)


def print_verified(found: Sequence[SavedCheckpoint]) -> None:
    """Print which checkpoints are intact, and what is wrong with the others."""
    for each in found:
        words = {
            "complete": f"verified, {format_size(each.bytes)} in {count(each.files, 'file')}"
        }.get(each.state, each.state)
        print(f"{each.name}  {words}" + (f": {each.why}" if each.why else ""))
    damaged = [each for each in found if each.state == "damaged"]
    unreadable = [each for each in found if each.state == "unreadable"]
    if unreadable:
        print_message(
            f"{len(unreadable)} of {len(found)} cannot be read with the PyTorch that is installed here"
        )
    if damaged:
        print_message(
            f"{len(damaged)} of {len(found)} damaged; a run that resumes uses the newest complete one before"
        )


def print_exported(done: ExportedCheckpoint) -> None:
    """Print the exported file and its source."""
    print(
        f"{done.path}: {count(done.tensors, 'tensor')}, {count(done.elements, 'element')}, {format_size(done.bytes)}, "
        f"of {done.checkpoint.uri}"
    )
    if done.skipped:
        more = f" and {len(done.skipped) - 3} more" if len(done.skipped) > 3 else ""  # noqa: PLR2004 (names in a line)
        print_message(
            f"left out, because they are not tensors: {', '.join(done.skipped[:3])}{more}"
        )
        print_message(f"  to export everything: {command_name()} checkpoints export ... --to torch")


def _row(each: SavedCheckpoint, now: float, *, own: str) -> tuple[str | Cell, ...]:
    seconds = each.age_seconds(now)
    age = Cell("")
    if seconds is not None:
        age = Cell(format_duration(seconds), shown=format_age(seconds))
    run = (each.run or "") if each.run != own else ""
    return (
        f"{each.step:,}",
        f"{each.state}, best" if each.best else each.state,
        age,
        format_size(each.bytes),
        "" if each.world_size is None else str(each.world_size),
        each.torch or "",
        each.name,
        run_cell(run),
        each.why,
    )


_FILE_COLUMNS = (
    Column("name", least=24),
    Column("files", is_number=True, drop=1, keep="pipe"),
    Column("size", is_number=True, keep="pipe"),
    Column("state", keep="pipe"),
)


def print_download(done: Download) -> None:
    """Print what a folder has got: a line per archive, checkpoint or folder."""
    groups: dict[str, list[CopiedFile]] = {}
    for each in done.files:
        groups.setdefault(_group(each.path), []).append(each)
    print(done.folder)
    rows = [
        (name, str(len(files)), format_size(_bytes(files)), _state(files))
        for name, files in groups.items()
    ]
    print_table(_FILE_COLUMNS, rows)
    for name, why in done.left_out.items():
        print_sentence(f"left out: {name} ({why})", print_message)
    for part, why in done.missing.items():
        print_sentence(f"no {part}: {why}", print_message)
    by_size = [each for each in done.files if each.verified == "size"]
    if by_size:
        print_message(
            f"{len(by_size)} of {len(done.files)} files verified by size only: S3 has no checksum of them"
        )


def _group(path: str) -> str:
    """Return what a file is shown as: itself, its folder, or its checkpoint."""
    first, _, rest = path.partition("/")
    inner, slash, _ = rest.partition("/")
    if first == "checkpoints":
        return f"{first}/{inner}{slash}"
    if rest:
        return f"{first}/"
    return first


def _bytes(files: list[CopiedFile]) -> int:
    return sum(each.bytes for each in files)


def _state(files: list[CopiedFile]) -> str:
    old = sum(not each.is_new for each in files)
    if not old:
        return "verified"
    if old == len(files):
        return "was there already"
    return f"verified, {old} were there already"
