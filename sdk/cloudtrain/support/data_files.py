"""The files of a local folder of data, in the same order for uploads, local runs and counts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class DataFile(NamedTuple):
    """A file, and its path relative to the folder with `/` between the parts."""

    path: Path
    name: str


def data_files(
    root: Path,
    *,
    on_error: Callable[[OSError], None] | None = None,
    on_dangling_link: Callable[[DataFile], None] | None = None,
    most_in_folder: int | None = None,
) -> Iterator[DataFile]:
    """Yield the regular files of a folder, or a file itself, in the order of their names.

    Links to files and folders are followed, except a link to a folder that contains the link.

    Args:
        root: A folder or a file.
        on_error: Called with the error of each folder that cannot be listed; by default such a folder is left out.
        on_dangling_link: Called with each link whose target does not exist; by default such a link is left out.
        most_in_folder: Most entries of each folder that are listed, whichever the file system names first.
    """
    if root.is_file():
        yield DataFile(root, root.name)
        return
    yield from _below(root, "", (), on_error, on_dangling_link, most_in_folder)


def _below(
    folder: Path,
    prefix: str,
    above: tuple[tuple[int, int], ...],
    on_error: Callable[[OSError], None] | None,
    on_dangling_link: Callable[[DataFile], None] | None,
    most_in_folder: int | None,
) -> Iterator[DataFile]:
    try:
        found = folder.stat()
        with os.scandir(folder) as listed:
            some = itertools.islice(listed, most_in_folder)
            entries = sorted(some, key=lambda entry: entry.name)
    except OSError as error:
        if on_error is not None:
            on_error(error)
        return
    identity = (found.st_dev, found.st_ino)
    if identity in above:
        # Reached through a link to a folder that contains it.
        return
    for entry in entries:
        path = folder / entry.name
        # The kind of an entry needs no system call. For a link whose target is missing, a path has no error.
        kind = path if entry.is_symlink() else entry
        if kind.is_dir():
            yield from _below(
                path,
                f"{prefix}{entry.name}/",
                (*above, identity),
                on_error,
                on_dangling_link,
                most_in_folder,
            )
        elif kind.is_file():
            yield DataFile(path, prefix + entry.name)
        elif on_dangling_link is not None and entry.is_symlink() and not path.exists():
            on_dangling_link(DataFile(path, prefix + entry.name))
