"""The folder of local runs."""

from __future__ import annotations

import os
from pathlib import Path

from cloudtrain.errors import UserError
from cloudtrain.runs.known_runs import recorded_homes
from cloudtrain.support.home_folder import DEFAULT_NAME, is_own, search_homes

HOME_VARIABLE = "CLOUDTRAIN_HOME"


def find_home() -> Path:
    """Return the folder of local runs: CLOUDTRAIN_HOME, else the nearest own `.cloudtrain` upwards, else one here."""
    if os.environ.get(HOME_VARIABLE):
        return Path(os.environ[HOME_VARIABLE]).absolute()
    here = Path.cwd()
    home, _ = search_homes(here)
    return home or here / DEFAULT_NAME


def other_homes() -> tuple[Path, ...]:
    """Return the folders of local runs that the user's submits have used besides `find_home()`, the newest first.

    CLOUDTRAIN_HOME excludes all others.
    """
    if os.environ.get(HOME_VARIABLE):
        return ()
    here = find_home()
    return tuple(
        home
        for home in recorded_homes(os.environ)
        if home != here and home.is_dir() and is_own(home)
    )


def make_home() -> Path:
    """Return the folder of local runs; create it when it does not exist.

    Raises:
        UserError: It cannot be created.
    """
    home = find_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{home}: cannot be a folder for runs: {error.strerror}", f"set {HOME_VARIABLE}"
        ) from None
    return home
