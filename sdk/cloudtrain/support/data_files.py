"""The files of a local folder of data, in the same order for uploads, local runs and counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class DataFile(NamedTuple):
    """A file, and its path relative to the folder with `/` between the parts."""

    path: Path
    name: str


def data_files(
    root: Path, *, on_error: Callable[[OSError], None] | None = None
) -> Iterator[DataFile]:
    """Yield the regular files of a folder, or a file itself, in the order of their names.

    Links to files and folders are followed, except a link to a folder that contains the link.

    Args:
        root: A folder or a file.
        on_error: Called with the error of each folder that cannot be listed; by default such a folder is left out.
    """
    if root.is_file():
        yield DataFile(root, root.name)
        return
    yield from _below(root, "", (), on_error)


def _below(
    folder: Path,
    prefix: str,
    above: tuple[tuple[int, int], ...],
    on_error: Callable[[OSError], None] | None,
) -> Iterator[DataFile]:
    try:
        found = folder.stat()
        with os.scandir(folder) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
    except OSError as error:
        if on_error is not None:
            on_error(error)
        return
    identity = (found.st_dev, found.st_ino)
    if identity in above:  # reached through a link to a folder that contains it
        return
    for entry in entries:
        path = folder / entry.name
        # The kind of an entry needs no system call. For a link whose target is missing, a path has no error.
        kind = path if entry.is_symlink() else entry
        if kind.is_dir():
            yield from _below(path, f"{prefix}{entry.name}/", (*above, identity), on_error)
        elif kind.is_file():
            yield DataFile(path, prefix + entry.name)
