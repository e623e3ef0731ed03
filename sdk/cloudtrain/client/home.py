"""The folder of local runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from cloudtrain.bundle.git_source import tracks_files
from cloudtrain.errors import UntrustedHomeError, UserError
from cloudtrain.runs.known_runs import recorded_homes
from cloudtrain.support import home_folder
from cloudtrain.support.home_folder import DEFAULT_NAME, find_owner, is_own, search_homes
from cloudtrain.support.known_homes import (
    is_known_home,
    is_unmarked_home,
    is_unused_home,
    remember_home,
)

HOME_VARIABLE = "CLOUDTRAIN_HOME"


def find_home() -> Path:
    """Return the folder of local runs: CLOUDTRAIN_HOME, else the nearest own `.cloudtrain` upwards, else one here.

    Raises:
        UntrustedHomeError: The nearest one holds runs that this user did not start on this machine.
        UserError: The one here belongs to another user, or git tracks files in the nearest one.
    """
    if os.environ.get(HOME_VARIABLE):
        return Path(os.environ[HOME_VARIABLE]).absolute()
    here = Path.cwd()
    home, foreign = search_homes(here)
    if home is None and here / DEFAULT_NAME in foreign:
        raise UserError(
            f"{here / DEFAULT_NAME} belongs to {find_owner(here / DEFAULT_NAME)} or can be changed by other users",
            f"name another folder for local runs: {HOME_VARIABLE}",
        )
    if home is None:
        return here / DEFAULT_NAME
    if tracks_files(home):
        raise UserError(
            f"git tracks files in {home}, so a pull can put runs and their code there",
            f"git rm -r --cached {shlex.quote(str(home))}, or name another folder: {HOME_VARIABLE}",
        )
    if not _is_trusted(home):
        raise UntrustedHomeError(home)
    return home


def all_homes() -> tuple[Path, ...]:
    """Return `find_home()`, and then the other folders of local runs that the user's submits have used, newest first.

    CLOUDTRAIN_HOME excludes all others.

    Raises:
        UserError: As `find_home`.
    """
    here = find_home()
    if os.environ.get(HOME_VARIABLE):
        return (here,)
    others = (home for home in recorded_homes(os.environ) if home != here)
    return (here, *filter(_is_usable, others))


def _is_usable(home: Path) -> bool:
    """Return whether runs of a folder count in other folders, too."""
    return home.is_dir() and is_own(home) and _is_trusted(home) and not tracks_files(home)


def make_home() -> Path:
    """Return the folder of local runs; create it when it does not exist.

    Raises:
        UserError: It cannot be created.
    """
    home = find_home()
    try:
        home_folder.make_home(home)
    except OSError as error:
        raise UserError(
            f"{home}: cannot be a folder for runs: {error.strerror}", f"set {HOME_VARIABLE}"
        ) from None
    return home


def trust_home(home: Path) -> None:
    """Store the user's agreement to use a folder of local runs.

    Raises:
        UserError: The agreement cannot be stored.
    """
    try:
        remember_home(home)
    except OSError as error:
        raise UserError(
            f"{error.filename}: the answer cannot be stored: {error.strerror}",
            f"set XDG_CONFIG_HOME to a folder that you can write, or {HOME_VARIABLE}={home}",
        ) from None


def _is_trusted(home: Path) -> bool:
    """Return whether the user has made a folder, has agreed to use it, or it has nothing to use.

    Folders of earlier versions have no id. They count where the user's submits are recorded.
    """
    if is_known_home(home) or is_unused_home(home):
        return True
    return is_unmarked_home(home) and home.absolute() in recorded_homes(os.environ)
