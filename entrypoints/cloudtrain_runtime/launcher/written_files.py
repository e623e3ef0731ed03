"""Records of what a script's processes write to, from which the launcher finds the files that are not kept (`unkept_files`).

On a machine that others use, too, each Python process of the ranks records what it writes to: by Python's audit events,
by the words of the commands that it starts (`cp`, `dd`), and by three functions that write without Python's `open`.
Files that another program writes into a folder that was there are not found then.

Standard library only, and as few modules of it as possible: each Python process of the ranks imports this module at its
start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator

from cloudtrain_runtime.process.after_import import call_after_import

TYPE_CHECKING = False  # not from typing, whose import takes longer than this module's own
if TYPE_CHECKING:
    from typing import Any

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

FILE = "file"
FOLDER = "folder"
WORD = "word"
"""Kinds of recorded paths: a file that is written, a folder that is new, a word of a command."""


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
                    self.add(FILE, os.fsdecode(path))
            return plain(*arguments, **options)

        setattr(module, name, save)


def _opened(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    path, _, flags = arguments
    if flags & _WRITES and not isinstance(path, int):
        yield FILE, os.fsdecode(path)


def _connected(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    yield FILE, os.fsdecode(arguments[0])


def _created(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    path = os.fsdecode(arguments[0])
    if not os.path.lexists(path):
        # In a folder that was there, others may write, too.
        yield FOLDER, path


def _moved(_event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    yield FOLDER if os.path.isdir(arguments[0]) else FILE, os.fsdecode(arguments[1])


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
    return WORD if os.path.lexists(path) else FOLDER


_FINDERS: dict[str, Callable[[str, tuple[Any, ...]], Iterator[tuple[str, str]]]] = {
    "open": _opened,
    "sqlite3.connect": _connected,
    "os.mkdir": _created,
    "os.rename": _moved,
    "os.link": _moved,
    **dict.fromkeys(_COMMANDS, _commanded),
}
"""Functions that yield the paths of an audit event (docs.python.org/3/library/audit_events.html)."""
