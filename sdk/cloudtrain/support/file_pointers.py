"""Files that are there by name only: what a tool leaves in place of content that it has not fetched."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cloudtrain.support.data_files import DataFile, data_files
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

MAX_FILES = 10_000
"""Most files of a folder of data whose names are looked at."""
_MAX_POINTER_BYTES = 1024
"""A pointer of Git LFS is smaller, by its specification; one of git-annex is one line."""
_IN_GROUP = 20
"""Most files that are looked into of one folder and suffix, of which a tool fetches all or none."""
_MAX_LOOKED_INTO = 2_000
_NAMES_SHOWN = 3
_LFS = lazy_pattern(
    rb"version https://(git-lfs\.github|hawser\.github)\.com/spec/[^\n]*\n(?=.*\boid )", re.DOTALL
)
_ANNEX = lazy_pattern(rb"(\.\./)*(\.git)?/annex/objects/")
_DVC_OUT = lazy_pattern(r"^[ -]*path:[ ]*(?P<path>.+?)[ ]*$", re.MULTILINE)
_SUBMODULE = lazy_pattern(r"^\s*path\s*=\s*(?P<path>.+?)\s*$", re.MULTILINE)
_ABOUT_DATA = lazy_pattern(r"(^|/)(\.|readme|licen[cs]e|notice)|\.(md|rst|dvc)$", re.IGNORECASE)
"""Files about the data, such as README.md and .gitattributes."""


class PointerKind(NamedTuple):
    """What stands in for the content.

    Attributes:
        singular: What such a file is.
        plural: What several are.
        fix: How to get the content.
    """

    singular: str
    plural: str
    fix: str


LFS = PointerKind("is a Git LFS pointer", "are Git LFS pointers", "run git lfs pull")
ANNEX = PointerKind("is a git-annex pointer", "are git-annex pointers", "run git annex get")
DVC = PointerKind("is known to DVC only", "are known to DVC only", "run dvc pull")
SUBMODULE = PointerKind(
    "is a submodule that is not checked out",
    "are submodules that are not checked out",
    "run git submodule update --init",
)
_LINK = PointerKind(
    "is a link without a target",
    "are links without a target",
    "fetch the target, for example with git annex get or dvc pull",
)


class Pointers(NamedTuple):
    """What is there by name only.

    Attributes:
        names: Names of files and folders by kind.
        is_all: Whether there is no other data.
        is_sample: Whether some files were not looked into, because there are many.
    """

    names: Mapping[PointerKind, list[str]]
    is_all: bool = False
    is_sample: bool = False

    @property
    def message(self) -> str:
        """What is there by name only; empty if there is nothing."""
        found = "; ".join(_describe(kind, names) for kind, names in self.names.items())
        if found and self.is_sample:
            return f"{found} (in a sample of the files)"
        return found

    @property
    def hint(self) -> str:
        """How to get the content."""
        return "; ".join(kind.fix for kind in self.names)


def _describe(kind: PointerKind, names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        shown += f" and {len(names) - _NAMES_SHOWN} more"
    verb = kind.singular if len(names) == 1 else kind.plural
    return f"{shown} {verb}"


def pointer_kind(data: bytes) -> PointerKind | None:
    """Return the kind of pointer that a file with this content is; None for any other file."""
    if len(data) >= _MAX_POINTER_BYTES:
        return None
    if _LFS.match(data):
        return LFS
    return ANNEX if _ANNEX.match(data) else None


def pointer_kind_of(path: Path) -> PointerKind | None:
    """Return the kind of pointer that a file is. Large files are not read, and one that cannot be read is none."""
    if not 0 < _size(path) < _MAX_POINTER_BYTES:
        return None
    with contextlib.suppress(OSError):
        return pointer_kind(path.read_bytes())
    return None


def _size(path: Path) -> int:
    """Return the size of a regular file in bytes; -1 for anything else."""
    with contextlib.suppress(OSError, ValueError):
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_size
    return -1


def find_pointers(root: Path) -> Pointers:
    """Return what is there by name only in a folder of data, or whether a file itself is.

    Of many files only a sample is looked into: in each folder some of each suffix. What cannot be read is left out; the
    upload and the run report it.
    """
    found: dict[PointerKind, list[str]] = {}
    dangling: list[DataFile] = []
    listed = data_files(root, on_dangling_link=dangling.append, most_in_folder=MAX_FILES)
    files = list(itertools.islice(listed, MAX_FILES))
    sample = list(itertools.islice(_sample(files), _MAX_LOOKED_INTO))
    for file in sample:
        if (kind := pointer_kind_of(file.path)) is not None:
            found.setdefault(kind, []).append(file.name)
    for file in files:
        if file.name.endswith(".dvc"):
            found.setdefault(DVC, []).extend(_unfetched(file))
    found.setdefault(_LINK, []).extend(file.name for file in dangling)
    if root.is_dir():
        found.setdefault(SUBMODULE, []).extend(missing_submodules(root))
    names = {kind: names for kind, names in found.items() if names}
    missing = {name for each in names.values() for name in each}
    others = (file for file in sample if file.name not in missing)
    return Pointers(
        names=names,
        is_all=bool(names) and all(_ABOUT_DATA.search(file.name) for file in others),
        is_sample=len(sample) < len(files) or len(files) == MAX_FILES,
    )


def _sample(files: Iterable[DataFile]) -> Iterator[DataFile]:
    """Yield the first files of each folder and suffix."""
    groups: dict[tuple[str, str], list[DataFile]] = {}
    for file in files:
        folder, _, base = file.name.rpartition("/")
        groups.setdefault((folder, os.path.splitext(base)[1]), []).append(file)  # noqa: PTH122 (often)
    for group in groups.values():
        yield from group[:_IN_GROUP]


def _unfetched(file: DataFile) -> Iterator[str]:
    """Yield the outputs of a `.dvc` file that do not exist."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for match in _DVC_OUT.finditer(file.path.read_text(encoding="utf-8")):
            name = match["path"].strip("'\"")
            if not (file.path.parent / name).exists():
                yield (PurePosixPath(file.name).parent / name).as_posix()


def missing_submodules(folder: Path) -> Iterator[str]:
    """Yield the submodules in a folder that are not checked out, each with a slash at its end.

    They are listed in `.gitmodules` at the root of the repository, which archives of a repository contain, too.
    """
    folder = folder.resolve()
    for root in (folder, *folder.parents):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            listed = (root / ".gitmodules").read_text(encoding="utf-8")
            for match in _SUBMODULE.finditer(listed):
                path = root / match["path"]
                if path.is_relative_to(folder) and _is_empty_folder(path):
                    yield f"{path.relative_to(folder).as_posix()}/"
        if os.path.exists(root / ".git"):  # noqa: PTH110 (a Path would raise for an unreadable folder)
            return


def enclosing_submodule(path: Path) -> Path | None:
    """Return the folder in which a path is missing, if it is a submodule that is not checked out."""
    path = path.absolute()
    # os.path returns False for a folder that must not be read; a Path would raise.
    folder = next((each for each in path.parents if os.path.isdir(each)), None)  # noqa: PTH112
    if folder is None or not _is_empty_folder(folder):
        return None
    return folder if any(missing_submodules(folder)) else None


def _is_empty_folder(path: Path) -> bool:
    try:
        with os.scandir(path) as children:
            return next(children, None) is None
    except (OSError, ValueError):
        return False
