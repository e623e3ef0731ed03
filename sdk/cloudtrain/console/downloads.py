"""Output about downloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.console import print_columns, print_message
from cloudtrain.support.units import format_size

if TYPE_CHECKING:
    from cloudtrain.runs.downloads import Download
    from cloudtrain.runs.file_transfer import CopiedFile


def print_download(done: Download) -> None:
    """Print what a folder has got: a line per archive, checkpoint or folder."""
    groups: dict[str, list[CopiedFile]] = {}
    for each in done.files:
        groups.setdefault(_group(each.path), []).append(each)
    print(done.folder)
    rows = [(name, str(len(files)), format_size(_bytes(files)), _state(files)) for name, files in groups.items()]
    print_columns([("name", "files", "size", "state"), *rows])
    for name, why in done.left_out.items():
        print_message(f"left out: {name} ({why})")
    for part, why in done.missing.items():
        print_message(f"no {part}: {why}")
    by_size = [each for each in done.files if each.verified == "size"]
    if by_size:
        print_message(f"{len(by_size)} of {len(done.files)} files verified by size only: S3 has no checksum of them")


def _group(path: str) -> str:
    """Return what a file is shown as: itself, its folder, or its checkpoint."""
    first, _, rest = path.partition("/")
    inner, slash, _ = rest.partition("/")
    return f"{first}/{inner}{slash}" if first == "checkpoints" else f"{first}/" if rest else first


def _bytes(files: list[CopiedFile]) -> int:
    return sum(each.bytes for each in files)


def _state(files: list[CopiedFile]) -> str:
    old = sum(not each.is_new for each in files)
    return (
        "verified" if not old else "was there already" if old == len(files) else f"verified, {old} were there already"
    )
