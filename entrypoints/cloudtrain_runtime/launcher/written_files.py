"""Files that a script's processes create outside of the folders that are kept.

An instance is the job's alone: there, every new file in a folder that programs write to is the script's. On a machine
that others use, too, each Python process of the ranks records what it writes to: by Python's audit events, by the words
of the commands that it starts (`cp`, `dd`), and by three functions that write without Python's `open`. Files that
another program writes into a folder that was there are not found then.

Standard library only: each Python process of the ranks imports this module at its start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain_runtime.process.after_import import call_after_import

_MOST_PATHS = 50_000
"""Paths that a process records at most."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_COMMANDS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})
_SEPARATORS = re.compile(r"[\s=;|&<>'\"()]+")
_SAVING = {
    "torch.serialization": ("save", 1),
    "safetensors.torch": ("save_file", 1),
    "safetensors.numpy": ("save_file", 1),
    "torch.jit": ("save", 1),
    "torch.export": ("save", 1),
}
"""Functions that write a file without Python's `open`, by module, with the position of the path."""

_FILE = "file"
_FOLDER = "folder"
_WORD = "word"
"""Kinds of recorded paths: a file that is written, a folder that is new, a word of a command."""

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


def start(place: str) -> None:
    """Record in a file what this process and its forks write to, from now on.

    Args:
        place: The file; all processes of a host append to it.
    """
    recorder = _Recorder(place)
    sys.addaudithook(recorder.on_event)
    for module, (name, position) in _SAVING.items():
        call_after_import(module, functools.partial(recorder.watch, name=name, position=position))


class _Recorder:
    def __init__(self, place: str) -> None:
        self._place = place
        self._seen: set[str] = set()

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record the paths of an audit event. It must not fail: an exception would end what the program does."""
        find = _FINDERS.get(event)
        if find is None:
            return
        with contextlib.suppress(Exception):
            for kind, path in find(event, arguments):
                self.add(kind, path)

    def add(self, kind: str, path: str) -> None:
        """Record a path once."""
        entry = f"{kind} {os.path.abspath(path)}\0"
        if entry in self._seen or len(self._seen) >= _MOST_PATHS or path == self._place:
            return
        self._seen.add(entry)
        handle = os.open(self._place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, os.fsencode(entry))
        finally:
            os.close(handle)

    def watch(self, module: Any, *, name: str, position: int) -> None:
        """Record the path that a function of a module gets."""
        plain: Callable[..., Any] = getattr(module, name)

        @functools.wraps(plain)
        def save(*arguments: Any, **options: Any) -> Any:
            named = options.get("f", options.get("filename"))
            path = arguments[position] if len(arguments) > position else named
            if isinstance(path, str | os.PathLike):
                with contextlib.suppress(Exception):
                    self.add(_FILE, os.fsdecode(path))
            return plain(*arguments, **options)

        setattr(module, name, save)


def _opened(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    path, _, flags = arguments
    if flags & _WRITES and not isinstance(path, int):
        yield _FILE, os.fsdecode(path)


def _connected(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    yield _FILE, os.fsdecode(arguments[0])


def _created(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    path = os.fsdecode(arguments[0])
    if not os.path.lexists(path):
        # In a folder that was there, others may write, too.
        yield _FOLDER, path


def _moved(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    yield _FOLDER if os.path.isdir(arguments[0]) else _FILE, os.fsdecode(arguments[1])


def _commanded(event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """Yield the words of a command that can be paths, and the names that copies into a folder get."""
    command = arguments[{"os.system": 0, "os.spawn": 2}.get(event, 1)]
    folder = "."
    if event == "subprocess.Popen" and arguments[2]:
        # The working directory of the process.
        folder = arguments[2]
    parts = [command] if isinstance(command, str | bytes) else list(command)
    given = [os.fsdecode(each) for each in parts]
    # An argument can be a path with a space or a bracket in it, or contain paths, as those of `sh
    # -c` and `dd` do.
    words = {*given, *(word for each in given for word in _SEPARATORS.split(each))} - {""}
    names = {os.path.basename(each.rstrip("/")) for each in words} - {""}
    for word in words:
        path = os.path.join(os.fsdecode(folder), os.path.expanduser(word))
        yield _kind_of_word(path), path
        if os.path.isdir(path):
            below = [os.path.join(path, name) for name in names]
            yield from ((_kind_of_word(each), each) for each in below)


def _kind_of_word(path: str) -> str:
    """Return the kind of a path in a command: a folder that the command creates, as `cp -r` does, is the run's."""
    return _WORD if os.path.lexists(path) else _FOLDER


_FINDERS: dict[str, Callable[[str, tuple[Any, ...]], Iterator[tuple[str, str]]]] = {
    "open": _opened,
    "sqlite3.connect": _connected,
    "os.mkdir": _created,
    "os.rename": _moved,
    "os.link": _moved,
    **dict.fromkeys(_COMMANDS, _commanded),
}
"""Functions that yield the paths of an audit event (docs.python.org/3/library/audit_events.html)."""


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
            if kind == _FOLDER and os.path.isdir(path) and not os.path.islink(path):
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
    order = (_WORD, _FILE, _FOLDER)
    found: dict[str, str] = {}
    for entry in entries[:-1]:
        kind, _, path = os.fsdecode(entry).partition(" ")
        if kind in order and order.index(kind) >= order.index(found.get(path, _WORD)):
            found[path] = kind
    return found
