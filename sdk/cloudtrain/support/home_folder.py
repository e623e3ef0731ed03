"""Folders for cloudtrain's own files."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from cloudtrain.support.known_homes import remember_home

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
    if home not in (found, Path.cwd() / DEFAULT_NAME):
        return ()
    return foreign


def find_owner(folder: Path) -> str:
    """Return the name of a folder's owner, or `another user` if it is unknown."""
    try:
        return folder.owner()
    except (OSError, KeyError):
        return "another user"


def is_own(home: Path) -> bool:
    """Return whether a folder belongs to this user, and others cannot write to it."""
    link = home.lstat()
    folder = home.stat()
    is_mine = link.st_uid == folder.st_uid == os.geteuid()
    return is_mine and not is_writable_by_others(home)


def is_writable_by_others(folder: Path) -> bool:
    """Return whether the mode of a folder lets other users write to it.

    Many systems give each user a group of their own and make new folders writable for it, which lets nobody else in.
    """
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status)


def _is_private(status: os.stat_result) -> bool:
    """Return whether a folder's group is that of its owner alone, by the names and members that the system lists."""
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        # As in containers whose user has no name.
        return status.st_uid == status.st_gid
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def make_home(home: Path) -> None:
    """Create a folder of local runs, and remember that it is this user's, unless others can write to it.

    Raises:
        OSError: The folder cannot be created.
    """
    make_folder(home)
    # Where this fails, later commands that find the folder ask before they use it.
    with contextlib.suppress(OSError):
        if is_own(home):
            remember_home(home)


def make_folder(home: Path, mode: int = 0o755) -> None:
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
