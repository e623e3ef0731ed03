"""What of a job's start is its own code, what is of packages, and why it cannot start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from cloudtrain.job.standard_library import STANDARD_LIBRARY
from cloudtrain.job.static_analysis.module_search import is_below, may_be_installed
from cloudtrain.job.static_analysis.signs import changes_path
from cloudtrain.job.static_analysis.start_trace import (
    Import,
    OwnModule,
    StartedCode,
    StartTrace,
)
from cloudtrain.job.static_analysis.syntax import Module, read_module


class JobCode:
    """The code of a job: its modules, and where Python looks for others.

    Args:
        directory: The code folder.
        entry: The file that is started or imported first.
        modules: The modules of the job, the entry first.
        includes: Folders outside of the code folder, by the name under which they are imported.
        search: Folders of PYTHONPATH, relative to the code folder.
    """

    def __init__(
        self,
        directory: Path,
        entry: Path,
        modules: list[Module],
        includes: Mapping[str, Path],
        search: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.entry = _normal(entry)
        self.first = modules[0]
        self.modules = {_normal(directory / each.file): each for each in modules}
        self.includes = includes
        self.search = tuple(_normal(directory / each) for each in search)
        self.changes_path = any(map(changes_path, modules))

    def trace(self, module: str | None, task: str) -> StartedCode:
        """Return what the code certainly does when it starts as a script or module, or when its Task is used."""
        name = self._module_of_entry() if task else module or ""
        first = self.directory if name else self.entry.parent
        above = [each for each in self.entry.parents if each.is_relative_to(self.directory)]
        trace = StartTrace(
            roots=(first, *self.search),
            others=(self.directory, self.directory / "src", *above),
            includes=self.includes,
            read=self._read,
            is_package=partial(may_be_installed, directory=self.directory),
        )
        return trace.run(OwnModule(self.entry, name, self.first), task)

    def _module_of_entry(self) -> str:
        """Return the name under which the runtime imports the entry."""
        roots = [self.directory, *(folder.parent for folder in self.includes.values())]
        root = next((each for each in roots if self.entry.is_relative_to(each)), self.entry.parent)
        name = self.entry.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        return name.removesuffix("__init__").removesuffix(".")

    def _read(self, path: Path) -> Module | None:
        if path in self.modules:
            return self.modules[path]
        return read_module(path)

    def packages(self, started: StartedCode) -> tuple[tuple[str, str], ...]:
        """Return the modules that are neither the job's own nor Python's, each with the first place."""
        found: dict[str, str] = {}
        for each in started.imports:
            if each.package not in found and not self._is_own(each):
                found[each.package] = self.place(each.path, each.line)
        return tuple(found.items())

    def _is_own(self, each: Import) -> bool:
        if each.own is not None or each.elsewhere is not None:
            return True
        top = each.package.partition(".")[0]
        if top in STANDARD_LIBRARY or top in self.includes or top in ("cloudtrain_runtime", ""):
            return True
        return (self.changes_path or bool(self.search)) and is_below(self.directory, top)

    def first_own_address(self, started: StartedCode) -> str | None:
        """Return the place that sets MASTER_ADDR to this host, or None."""
        return next((self.place(*each) for each in started.own_address), None)

    def path_imports(self, started: StartedCode) -> Iterator[tuple[str, str]]:
        """Yield imports of the job's own modules that are not on the import path, each with the folder to add."""
        if self.changes_path:
            return
        seen = set()
        for each in started.imports:
            if each.elsewhere is None:
                continue
            folder = os.path.relpath(each.elsewhere, self.directory)
            if folder in seen or folder.startswith(".."):
                continue
            seen.add(folder)
            yield f"{self.place(each.path, each.line)} imports {each.top}", folder

    def start_faults(self, started: StartedCode, script: str, module: str | None) -> Iterator[str]:
        """Yield why the code cannot start, each with what to write."""
        for path, line, text in started.relative[:1]:
            yield self._describe_relative(path, line, text, script, module)
        for path, line in started.notebook[:1]:
            yield (
                f"{self.place(path, line)} calls get_ipython(), which only notebooks have, so the code cannot start: "
                "remove the lines with it, which the export of a notebook made from its magic commands (%, !)"
            )

    def _describe_relative(
        self, path: Path, line: int, text: str, script: str, module: str | None
    ) -> str:
        what = f"{self.place(path, line)}: {text} is relative to a package, and Python"
        if path != self.entry or module is not None:
            return f"{what} imports this module without one: use the absolute name in place of the dots"
        name = script.removesuffix(".py").replace("/", ".")
        level = len(text.removeprefix("from ")) - len(text.removeprefix("from ").lstrip("."))
        if level <= name.count(".") and all(map(str.isidentifier, name.split("."))):
            return f"{what} starts a script without one, so it cannot start: in place of code.script use code.module: {name}"
        return f"{what} starts a script without one, so it cannot start: use the absolute name in place of the dots"

    def place(self, path: Path, line: int) -> str:
        """Return `file:line`, relative to the code folder."""
        return f"{os.path.relpath(path, self.directory)}:{line}"


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path))
