"""Folders that a sandbox creates in its home, which may be a folder with files of others: only marked ones are deleted."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

_MARK = ".cloudtrain-sandbox"
"""File in a folder that a sandbox has created."""


def claim_folder(wanted: Path) -> Path:
    """Create a folder with the sandbox's mark, under another name if files of others have this one.

    Args:
        wanted: The folder. What a sandbox has left there is deleted.

    Returns:
        The folder, which is empty but for the mark.
    """
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        _delete_marked(folder)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        (folder / _MARK).touch()
        return folder
    raise AssertionError("unreachable")


def delete_claimed(parent: Path) -> None:
    """Delete the folders below a folder that have a sandbox's mark."""
    if parent.is_dir():
        for folder in parent.iterdir():
            _delete_marked(folder)


def _delete_marked(folder: Path) -> None:
    if not folder.is_symlink() and (folder / _MARK).is_file():
        shutil.rmtree(folder, ignore_errors=True)
