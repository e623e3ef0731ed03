"""Places of files as people read them: a path below the working directory is relative."""

from __future__ import annotations

import os

from cloudtrain_runtime.contract.file_uri import path_of

_FILE = "file:"


def shown_place(place: str) -> str:
    """Return a path or a `file:` URI as a path, relative below the working directory; another URI is unchanged."""
    if "://" in place and not place.startswith(_FILE):
        return place
    path = str(path_of(place)) if place.startswith(_FILE) else place
    if not os.path.isabs(path):  # noqa: PTH117 (fast start)
        return path
    try:
        here = os.getcwd()  # noqa: PTH109 (fast start)
    except OSError:
        # The working directory has been deleted.
        return path
    if path == here:
        return "."
    below = here.rstrip(os.sep) + os.sep
    return path.removeprefix(below)
