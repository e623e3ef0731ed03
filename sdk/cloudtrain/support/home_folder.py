"""Folders for cloudtrain's own files."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

DEFAULT_NAME = ".cloudtrain"


def search_homes(here: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Return the nearest folder of local runs upwards, and the nearer ones that another user could change.

    What is in such a folder is executed, so those of other users do not count.
    """
    foreign = list[Path]()
    for folder in (here, *here.parents):
        home = folder / DEFAULT_NAME
        if not home.is_dir():
            continue
        if is_own(home):
            return home, tuple(foreign)
        foreign.append(home)
    return None, tuple(foreign)


def foreign_homes(home: Path) -> tuple[Path, ...]:
    """Return the folders that would be used in place of this one, which the search has found, if they were the user's."""
    found, foreign = search_homes(Path.cwd())
    return foreign if home in (found, Path.cwd() / DEFAULT_NAME) else ()


def find_owner(folder: Path) -> str:
    """Return the name of a folder's owner, or `another user` if it is unknown."""
    try:
        return folder.owner()
    except (OSError, KeyError):
        return "another user"


def is_own(home: Path) -> bool:
    """Return whether a folder belongs to this user, and others cannot write to it."""
    link, folder = home.lstat(), home.stat()
    is_writable = bool(folder.st_mode & stat.S_IWOTH)
    return link.st_uid == folder.st_uid == os.geteuid() and not is_writable


def make_home(home: Path, mode: int = 0o755) -> None:
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
