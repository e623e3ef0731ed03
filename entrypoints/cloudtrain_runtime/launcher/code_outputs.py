"""Files that a job writes into its code folder: those of `code.outputs` are kept, the others are reported.

Standard library only, like the launcher. SageMaker keeps the model folder, the output folder and the checkpoints
folder, and deletes everything else with the instance. An output of a script is stored in `checkpoints/outputs/`, from
where SageMaker copies it to S3 while the job runs and back when a later run resumes; the code folder has a link to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.process.event_log import emit, log_line

_SCAN_SECONDS = 2.0
_SCAN_ENTRIES = 200_000
_MOST_NAMED = 10
_CACHES = ("__pycache__", ".pytest_cache")


class CodeFolder:
    """One host's code folder, from just before the ranks start until they have ended.

    Args:
        outputs: Files and folders (these end with `/`) below the code folder that are kept.

    Raises:
        OSError: an output cannot be linked.
    """

    def __init__(self, tree: MlTree, outputs: Sequence[str]) -> None:
        self._tree = tree
        self._outputs = outputs
        for name in outputs:
            _link(tree.code / name, tree.outputs / name, is_folder=name.endswith("/"))
        self._before = frozenset(_scan(tree.code)[0])

    def report(self, host: str) -> None:
        """Keep outputs that replaced their link, and emit one event: files that are not kept, an empty model folder."""
        for name in self._outputs:
            try:
                _keep(self._tree.code / name, self._tree.outputs / name)
            except OSError as error:  # a full disk
                log_line(f"code.outputs: {name} on {host} cannot be kept: {error}")
        found: dict[str, list[int]] = {}
        files, is_complete = _scan(self._tree.code)
        for path, size in files.items():
            if path not in self._before and not self._is_output(path):
                top, slash, _ = path.partition("/")
                found.setdefault(top + slash, []).append(size)
        largest = sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))
        emit(
            "outputs",
            host=host,
            model_is_empty=not _entries(self._tree.model),
            unkept_files=sum(map(len, found.values())),
            unkept_bytes=sum(map(sum, found.values())),
            unkept=[
                {"path": name, "files": len(sizes), "bytes": sum(sizes)}
                for name, sizes in largest[:_MOST_NAMED]
            ],
            is_complete=is_complete,
            unwritten=[name for name in self._outputs if self._is_unwritten(name)],
        )

    def _is_unwritten(self, name: str) -> bool:
        target = self._tree.outputs / name
        return not _entries(target) if name.endswith("/") else not target.exists()

    def _is_output(self, path: str) -> bool:
        return any(
            path.startswith(name) if name.endswith("/") else path == name for name in self._outputs
        )


def newest_mtime(folder: Path) -> float:
    """Return when the newest file below a folder was written, in seconds since the epoch; 0 where there is none."""
    return max((_changed(folder / path) for path in _scan(folder)[0]), default=0.0)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0


def _scan(folder: Path) -> tuple[dict[str, int], bool]:
    """Return the sizes of the files below a folder by path, and whether these are all: a scan has a limited time.

    Links are not followed.
    """
    deadline, count = time.monotonic() + _SCAN_SECONDS, 0
    found: dict[str, int] = {}
    waiting = [""]
    while waiting:
        below = waiting.pop()
        for entry in _entries(folder / below):
            count += 1
            if count > _SCAN_ENTRIES or time.monotonic() > deadline:
                return found, False
            name = f"{below}{entry.name}"
            with contextlib.suppress(OSError):  # deleted meanwhile
                if entry.is_dir(follow_symlinks=False):
                    waiting += [] if entry.name in _CACHES else [f"{name}/"]
                elif entry.is_file(follow_symlinks=False):
                    found[name] = entry.stat(follow_symlinks=False).st_size
    return found, True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _link(place: Path, target: Path, *, is_folder: bool) -> None:
    """Replace an output in the code folder by a link to where it is kept; what is kept already wins."""
    _keep(place, target, replaces=False)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    (target if is_folder else target.parent).mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def _keep(place: Path, target: Path, *, replaces: bool = True) -> None:
    """Copy a file or folder that has replaced a link to where it is kept.

    A script replaces the link when it writes a temporary file and renames it, or deletes and recreates a folder.
    """
    if place.is_symlink() or not place.exists():
        return
    if place.is_dir():
        for path in place.rglob("*"):
            if path.is_file() and not path.is_symlink():
                _copy(path, target / path.relative_to(place), replaces=replaces)
    else:
        _copy(place, target, replaces=replaces)


def _copy(source: Path, target: Path, *, replaces: bool) -> None:
    if target.exists() and not replaces:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(target)
