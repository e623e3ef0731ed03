"""Folders for cloudtrain's own files."""

from __future__ import annotations

import contextlib
from pathlib import Path

DEFAULT_NAME = ".cloudtrain"


def make_home(home: Path, mode: int = 0o777) -> None:
    """Create a folder for cloudtrain's files, which Git ignores; an existing folder keeps its mode.

    A folder that others use, too, gets no `.gitignore`: it would hide their files from Git, and from bundles.

    Raises:
        OSError: The folder cannot be created.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=mode, exist_ok=True)
    if home.name == DEFAULT_NAME or not any(home.iterdir()):
        with contextlib.suppress(FileExistsError), (home / ".gitignore").open("x") as file:
            file.write("*\n")
