"""Files that a job writes beside the kept folders: those of `code.outputs` are kept, the others are reported.

Standard library only, like the launcher. SageMaker keeps the model folder, the output folder and the checkpoints
folder, and deletes everything else with the instance. An output of a script is stored in `checkpoints/outputs/`, from
where SageMaker copies it to S3 while the job runs and back when a later run resumes; the code folder has a link to it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from cloudtrain_runtime.contract import ML_ROOT_VARIABLE, MlTree
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.machine_paths import machine_path
from cloudtrain_runtime.launcher.unkept_files import (
    Budget,
    Surroundings,
    list_folder,
    new_files,
    places_of_instance,
    recorded_files,
    scan,
)
from cloudtrain_runtime.process.event_log import emit, log_line

_FILE = "file:"
_MOST_NAMED = 10
_CACHES = ("__pycache__", ".pytest_cache")
_RECORDS = "*/hosts/*/opt/ml/start/written"
"""Records of runs on this machine, below the folder of all local runs."""


class CodeFolder:
    """One host's code folder, from just before the ranks start until they have ended.

    Args:
        outputs: Files and folders (these end with `/`) below the code folder that are kept.
        checkpoints: Uri of the run's checkpoints; empty for /opt/ml/checkpoints.

    Raises:
        OSError: an output cannot be linked.
    """

    def __init__(self, tree: MlTree, outputs: Sequence[str], checkpoints: str = "") -> None:
        self._tree = tree
        self._checkpoints = checkpoints
        self._outputs = outputs
        self._names = [os.path.normpath(name) for name in outputs]
        for name in outputs:
            _link(tree.code / name, tree.outputs / name, is_folder=name.endswith("/"))
        self._before = frozenset(scan(str(tree.code), Budget(), skipped=_CACHES))
        self._began = time.time()
        # An earlier attempt may have left the file.
        tree.written.unlink(missing_ok=True)

    def report(self, host: str) -> None:
        """Keep outputs that replaced their link, and emit one event: files that are not kept, an empty model folder."""
        for name in self._outputs:
            try:
                _keep(self._tree.code / name, self._tree.outputs / name)
            except OSError as error:
                # Such as on a full disk.
                log_line(f"code.outputs: {name} on {host} cannot be kept: {error}")
        found: dict[str, list[int]] = {}
        inside = Budget()
        beside = Budget()
        for path, size in scan(str(self._tree.code), inside, skipped=_CACHES).items():
            if path in self._before or self._is_output(path):
                continue
            # A file in a folder counts for the folder, whose name ends with a slash.
            top, slash, _ = path.partition("/")
            found.setdefault(top + slash, []).append(size)
        for name, files in self._find_beside(beside).items():
            found[self._shown(name)] = list(files.values())
        largest = sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))
        emit(
            "outputs",
            host=host,
            model_is_empty=not list_folder(self._tree.model),
            unkept_files=sum(map(len, found.values())),
            unkept_bytes=sum(map(sum, found.values())),
            unkept=[
                {"path": name, "files": len(sizes), "bytes": sum(sizes)}
                for name, sizes in largest[:_MOST_NAMED]
            ],
            is_complete=inside.is_complete and beside.is_complete,
            unwritten=[name for name in self._outputs if self._is_unwritten(name)],
        )

    def _find_beside(self, budget: Budget) -> dict[str, dict[str, int]]:
        """Return the sizes of files that the job has created outside of its code folder, by folder or file."""
        tree = self._tree
        root = str(self._tree.root)
        kept = [str(each) for each in (tree.code, tree.model, tree.checkpoints, tree.start)]
        kept += [f"{root}/{name}" for name in ("input", "output")]
        # Several hosts, and a resumed run, save together in another folder than /opt/ml/checkpoints.
        if self._checkpoints.startswith(_FILE):
            kept.append(str(path_of(self._checkpoints)))
        # In a local run the checkpoints folder is elsewhere, and many programs resolve their output
        # folder.
        kept += [str(machine_path(Path(each), os.environ)) for each in kept]
        kept += [os.path.realpath(each) for each in kept]
        # Without the variable, this is an instance of its own.
        if ML_ROOT_VARIABLE not in os.environ:
            places = [*places_of_instance(), root]
            return new_files(places, self._began, Surroundings(root, kept), budget)
        # In a local run, this host's /opt/ml is RUNS/RUN/hosts/HOST/opt/ml.
        place = machine_path(tree.root, os.environ)
        runs = place.parents[4] if place.match("*/hosts/*/opt/ml") else place
        others = [
            str(each)
            for each in runs.glob(_RECORDS)
            # The clock of files is coarse.
            if each != MlTree(place).written and _changed(each) > self._began - 1
        ]
        around = Surroundings(root, kept, others)
        return recorded_files(str(tree.written), self._began, around, budget)

    def _shown(self, name: str) -> str:
        """Return the name of a folder or file for a message, from the code folder, the home folder or the root."""
        root = f"{self._tree.root}/"
        home = f"{Path.home()}/"
        if name.startswith(root):
            return f"../{name.removeprefix(root)}"
        if name.startswith(home):
            return f"~/{name.removeprefix(home)}"
        return name

    def _is_unwritten(self, name: str) -> bool:
        target = self._tree.outputs / name
        if name.endswith("/"):
            return not list_folder(target)
        return not target.exists()

    def _is_output(self, path: str) -> bool:
        return any(path == name or path.startswith(f"{name}/") for name in self._names)


def newest_mtime(folder: Path) -> float:
    """Return when the newest file below a folder was written, in seconds since the epoch; 0 where there is none."""
    files = scan(str(folder), Budget(), skipped=_CACHES)
    return max((_changed(folder / path) for path in files), default=0.0)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        # It was deleted meanwhile.
        return 0.0


def _link(place: Path, target: Path, *, is_folder: bool) -> None:
    """Replace an output in the code folder by a link to where it is kept; what is kept already wins."""
    _keep(place, target, replaces=False)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    (target if is_folder else target.parent).mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    # Relative, because a local run's /opt/ml has another path outside of its namespace.
    place.symlink_to(os.path.relpath(target, place.parent.resolve()))


def _keep(place: Path, target: Path, *, replaces: bool = True) -> None:
    """Copy a file or folder that has replaced a link to where it is kept.

    A script replaces the link when it writes a temporary file and renames it, or deletes and recreates a folder.
    """
    if place.is_symlink() or not place.exists():
        return
    if not place.is_dir():
        _copy(place, target, replaces=replaces)
        return
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink():
            _copy(path, target / path.relative_to(place), replaces=replaces)


def _copy(source: Path, target: Path, *, replaces: bool) -> None:
    if target.exists() and not replaces:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(target)
