"""Files that a script's processes create outside of the folders that are kept.

An instance is the job's alone: there, every new file in a folder that programs write to is the script's. On a machine
that others use, too, those files count that the processes have recorded (`written_files`).

Standard library only, like the launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain_runtime.launcher.written_files import FILE, FOLDER, WORD

_SLACK_SECONDS = 0.05
"""How much earlier than the clock the time of a new file can be."""

_CACHES = frozenset(
    {
        *("__pycache__", ".pytest_cache", ".mypy_cache", ".triton", ".nv", ".config", ".ipython"),
        "torch_extensions",
    }
)
"""Folders of files that a program can create again at any time."""

_CACHE_PATH = re.compile(
    r"/\.cache/(clip|flashinfer|fontconfig|gdown|huggingface|jax|kagglehub|matplotlib|modelscope|pip|torch|uv|vllm|wandb"
    r"|whisper)/"
    r"|/hub/(models|datasets|spaces)--"
    r"|/\.local/(lib|share/wandb)/"
    r"|/(\.EasyOCR|\.insightface|\.keras|nltk_data|scikit_learn_data|tensorflow_datasets)/"
    # Of tiktoken and Ray.
    r"|^/tmp/(data-gym-cache|ray)/"
)
"""Such folders whose names a user can choose, too, for results (`hub`, `uv`): only these places count."""

_TEMPORARY = re.compile(
    r"/(torchelastic_|torchinductor_|pymp-|tmp[a-z0-9_]{8}(wandb.*)?(/|$)|\.nfs)"
)
_SYSTEM = frozenset(
    {
        *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin"),
        *("snap", "sys", "usr"),
    }
)
"""Folders of the root that hold the system, its packages and its devices."""

SYSTEM_BELOW = frozenset(
    {
        *(f"/opt/{name}" for name in ("amazon", "aws", "conda", "hpcx", "ml", "nvidia", "venv")),
        *(f"/var/{name}" for name in ("backups", "cache", "lib", "local", "lock", "log", "mail")),
        *(f"/var/{name}" for name in ("run", "spool")),
    }
)
"""Such folders of /opt and /var, which have others, too. /opt/ml is scanned by itself."""

_ML = "/opt/ml/"


@dataclass
class Budget:
    """The time and the number of entries that scans may still take together."""

    seconds: float = 2.0
    entries: int = 200_000
    is_complete: bool = True
    _began: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Take one entry; return False when there is none left, or no time."""
        self.entries -= 1
        if self.entries < 0 or time.monotonic() - self._began > self.seconds:
            self.is_complete = False
        return self.is_complete


def scan(
    folder: str, budget: Budget, *, since: float = 0.0, skipped: Collection[str] = ()
) -> dict[str, int]:
    """Return the sizes of the files below a folder by path. Links are not followed.

    Args:
        folder: The folder.
        budget: What the scan may take.
        since: Only files that were created or written since this time, in seconds since the epoch.
        skipped: Names and absolute paths of folders that are left out.
    """
    found: dict[str, int] = {}
    waiting = [""]
    while waiting:
        below = waiting.pop()
        for entry in list_folder(os.path.join(folder, below)):
            if not budget.take():
                return found
            name = f"{below}{entry.name}"
            # An entry may be deleted meanwhile.
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    is_skipped = entry.name in skipped or entry.path in skipped
                    if not is_skipped and not _CACHE_PATH.search(f"{entry.path}/"):
                        waiting.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_ctime >= since:
                        found[name] = status.st_size
    return found


def list_folder(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


@dataclass(frozen=True)
class Surroundings:
    """What else is on the machine.

    Attributes:
        root: /opt/ml of this host, as its processes see it.
        kept: Folders that are left out, because they are kept, scanned elsewhere, or the runtime's.
        others: Files with the records of other runs on this machine.
    """

    root: str
    kept: Collection[str]
    others: Iterable[str] = ()


def recorded_files(
    place: str, since: float, around: Surroundings, budget: Budget
) -> dict[str, dict[str, int]]:
    """Return the files that the recorded paths name and that were written since a time.

    Returns:
        Sizes by path, by the folder (it ends with a slash) or file that a message names.
    """
    since -= _SLACK_SECONDS
    records = {_below(around.root, path): kind for path, kind in _read(place).items()}
    # Each run in a mount namespace has another /opt/ml.
    others = {path for other in around.others for path in _read(other) if not path.startswith(_ML)}
    foreign = others - set(records)
    found: dict[str, dict[str, int]] = {}
    seen: set[str] = set()

    def add(group: str, path: str, size: int) -> None:
        if path not in seen and path not in foreign and not is_left_out(path, around.kept):
            seen.add(path)
            found.setdefault(group, {})[path] = size

    # Sorted, a folder comes before what is in it.
    for path, kind in sorted(records.items()):
        with contextlib.suppress(OSError, ValueError):
            status = os.lstat(path)
            if status.st_ctime < since:
                continue
            if kind == FOLDER and os.path.isdir(path) and not os.path.islink(path):
                skipped = {*_CACHES, *around.kept}
                for name, size in scan(path, budget, since=since, skipped=skipped).items():
                    add(_group(path, found), os.path.join(path, name), size)
            elif os.path.isfile(path) and not os.path.islink(path):
                add(_group(path, found), path, status.st_size)
    return found


def new_files(
    places: Iterable[str], since: float, around: Surroundings, budget: Budget
) -> dict[str, dict[str, int]]:
    """Return all files in some folders that were written since a time, as `recorded_files` does."""
    found: dict[str, dict[str, int]] = {}
    skipped = {*_CACHES, *SYSTEM_BELOW, *around.kept}
    since -= _SLACK_SECONDS
    for place in places:
        for name, size in scan(place, budget, since=since, skipped=skipped).items():
            path = os.path.join(place, name)
            if is_left_out(path, around.kept):
                continue
            parts = name.split("/")
            # A hidden folder is named with its subfolder, such as ~/.cache/NAME/.
            depth = 2 if parts[0].startswith(".") else 1
            group = os.path.join(place, *parts[:depth])
            if len(parts) > depth:
                group += "/"
            found.setdefault(group, {})[path] = size
    return found


def places_of_instance() -> list[str]:
    """Return the folders of an instance to which programs write: the user's, temporary ones, new ones in the root."""
    top = sorted(entry.path for entry in list_folder("/") if entry.name not in _SYSTEM)
    named = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", os.path.expanduser("~")]  # noqa: S108 (they are read)
    # A data set in the root must not use up the scan's time before the places where most files are
    # found.
    folders = list(dict.fromkeys(each for each in [*named, *top] if os.path.isdir(each)))
    return [
        each
        for each in folders
        if not os.path.islink(each) and not any(each.startswith(f"{other}/") for other in folders)
    ]


def is_left_out(path: str, kept: Collection[str]) -> bool:
    """Return whether a file is kept, temporary, in a cache, or none on a disk."""
    if not _CACHES.isdisjoint(path.split("/")) or _CACHE_PATH.search(path):
        return True
    if _TEMPORARY.search(path):
        return True
    if path.startswith(("/dev/", "/proc/", "/sys/")):
        return True
    return any(path.startswith(f"{folder}/") for folder in kept)


def _group(path: str, groups: Collection[str]) -> str:
    """Return the folder among the groups that contains a path, else a group for the path itself."""
    above = os.path.dirname(path)
    while above != os.path.dirname(above):
        if f"{above}/" in groups:
            return f"{above}/"
        above = os.path.dirname(above)
    return path + ("/" if os.path.isdir(path) else "")


def _below(root: str, path: str) -> str:
    """Return a path below `/opt/ml` as one below the root."""
    if not path.startswith(_ML):
        return path
    return os.path.join(root, path.removeprefix(_ML))


def _read(place: str) -> dict[str, str]:
    """Return the recorded paths with their kinds; a new folder counts most, a word least."""
    try:
        with open(place, "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    order = (WORD, FILE, FOLDER)
    found: dict[str, str] = {}
    for entry in entries[:-1]:
        kind, _, path = os.fsdecode(entry).partition(" ")
        if kind in order and order.index(kind) >= order.index(found.get(path, WORD)):
            found[path] = kind
    return found
