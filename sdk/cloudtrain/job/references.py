"""What a job names on this machine: folders, files, the Task's class, local data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.errors import nearest
from cloudtrain.job.entry import check_methods, check_syntax, check_task
from cloudtrain.job.problems import Finding
from cloudtrain.support.data_files import data_files
from cloudtrain.support.field_path import FieldPath


@dataclass(frozen=True)
class References:
    """What a job names, as paths.

    Attributes:
        directory: The code folder.
        base: Folder that relative data paths start from.
        data: Uri or path by channel.
        sharded: Channels of which each instance gets a share.
        methods: Optional methods that the Task must have, with the field that needs it.
    """

    directory: Path
    base: Path
    task: str | None
    script: str | None
    requirements: str | None
    args: Mapping[str, Any] | tuple[Any, ...]
    data: Mapping[str, str]
    sharded: frozenset[str]
    instances: int
    methods: Mapping[str, FieldPath]

    def check(self) -> Iterator[Finding]:
        """Yield what is not there, or not what it should be."""
        yield from self._code()
        for name, uri in self.data.items():
            if not _has_scheme(uri):
                yield from self._channel(name, self.base / uri)

    def _code(self) -> Iterator[Finding]:
        at = ("code", "directory")
        if not is_there(self.directory):
            yield from _missing(at, self.directory, "folder")
            return
        if not self.directory.is_dir():
            yield Finding(f"expected a folder, and {self.directory} is a file", at, "name the folder that holds it")
            return
        if self.script is not None:
            yield from self._file("script", self.script)
            yield from self._syntax(self.directory / self.script)
        if self.requirements is not None:
            yield from self._file("requirements", self.requirements)
        if self.task is not None:
            yield from check_task(self.directory, self.task, self.args if isinstance(self.args, Mapping) else None)
            yield from check_methods(self.directory, self.task, self.methods)

    def _file(self, field: str, name: str) -> Iterator[Finding]:
        path = self.directory / name
        if not is_there(path):
            yield from _missing(("code", field), path, "file")
        elif not path.is_file():
            yield Finding(f"expected a file, and {path} is a folder", ("code", field), "name a file in it")
        elif field == "script" and path.suffix != ".py":
            yield Finding(f"expected a Python script, got {path.name}", ("code", field), "name a file that ends in .py")

    def _syntax(self, path: Path) -> Iterator[Finding]:
        if path.suffix == ".py" and is_there(path) and path.is_file():
            yield from check_syntax(path, ("code", "script"))

    def _channel(self, name: str, path: Path) -> Iterator[Finding]:
        at = ("data", name, "uri")
        if not is_there(path):
            yield from _missing(at, path, "file or folder")
            return
        if not path.is_dir() and not path.is_file():
            yield Finding(f"expected a file or folder, and {path} is neither", at, "name the data itself")
        elif self.directory.resolve().is_relative_to(path.resolve()):
            message = f"{path.resolve()} holds the code folder, which would be uploaded whole as data"
            yield Finding(message, at, "name the folder of the data alone")
        elif path.is_dir() and not _first_files(path, 1):
            yield Finding(f"no file lies in {path}", at, "put the data there, or name another folder")
        elif name in self.sharded and (count := _first_files(path, self.instances)) < self.instances:
            message = f"{count} files for {self.instances} instances: {self.instances - count} would get none"
            hint = f"use at least {self.instances} files, or sharded: false"
            yield Finding(message, ("data", name, "sharded"), hint, (at, ("cluster", "instances")))


def _has_scheme(uri: str) -> bool:
    return ":/" in uri


def is_there(path: Path) -> bool:
    """Return whether something lies at a path; a name that no file system takes does not."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, a NUL, a loop of links, a folder that may not be read
        return False


def _missing(at: tuple[str, ...], path: Path, kind: str) -> Iterator[Finding]:
    parent = path.parent
    near = None
    if is_there(parent) and parent.is_dir():
        try:
            near = nearest(path.name, [other.name for other in parent.iterdir()])
        except OSError:  # a folder that may not be read
            near = None
    hint = f'did you mean "{near}"?' if near else "relative paths start at the folder of the job file"
    yield Finding(f"no such {kind}: {path}", at, hint)


def _first_files(path: Path, enough: int) -> int:
    """Return how many files lie below a path, counting no further than `enough`."""
    return sum(1 for _ in itertools.islice(data_files(path), enough))
