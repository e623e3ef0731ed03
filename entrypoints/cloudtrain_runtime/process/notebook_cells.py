"""Import of a module that was written from the cells of a notebook: its tracebacks name the cell and the line in it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cloudtrain_runtime.contract.cell_format import Part, is_written, split_cells


def name_cells() -> None:
    """Let modules that were written from cells have the cells' lines, from the next import on."""
    if not any(isinstance(each, _CellFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, _CellFinder())


class _CellFinder(MetaPathFinder):
    """Finds modules as Python does, and loads those that were written from cells."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; None leaves it to Python."""
        if path is not None:
            # A module that is written is none of a package.
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if (
            spec is None
            or not isinstance(spec.loader, SourceFileLoader)
            or not is_written(spec.origin)
        ):
            return None
        spec.loader = _CellLoader(fullname, str(spec.origin))
        return spec


class _CellLoader(SourceFileLoader):
    """Loads a module whose functions and classes are named by their cells."""

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 (the base class's signature)
        """Return the code of the module, which no cache has."""
        text = self.get_data(self.path).decode("utf-8")
        parts = split_cells(text)
        for part in parts:
            _show_lines(part.place, "\n" * (part.line - 1) + part.code)
        whole = compile(text, self.path, "exec", dont_inherit=True)
        constants = (_rename(each, parts) for each in whole.co_consts)
        return whole.replace(co_consts=tuple(constants))


def _rename(constant: Any, parts: tuple[Part, ...]) -> Any:
    """Return a constant of a module's code; a function or class is named by its cell, and has its lines."""
    if not isinstance(constant, CodeType):
        return constant
    part = next((each for each in reversed(parts) if each.start <= constant.co_firstlineno), None)
    if part is None or constant.co_firstlineno >= part.start + part.code.count("\n"):
        return constant
    return _move(constant, part.place, part.line - part.start)


def _move(code: CodeType, place: str, lines: int) -> CodeType:
    # The lines of instructions count from the first one.
    return code.replace(
        co_filename=place,
        co_firstlineno=code.co_firstlineno + lines,
        co_consts=tuple(
            _move(each, place, lines) if isinstance(each, CodeType) else each
            for each in code.co_consts
        ),
    )


def _show_lines(place: str, source: str) -> None:
    """Let tracebacks show these lines of a cell, besides those of its other pieces."""
    lines = source.splitlines(keepends=True)
    old = linecache.getlines(place)
    if old:
        size = max(len(old), len(lines))
        padded = [*lines, *["\n"] * (size - len(lines))]
        lines = [
            new if new.strip() else before
            for new, before in zip(padded, [*old, *["\n"] * (size - len(old))], strict=True)
        ]
    if not Path(place).exists():
        # Without a time of change it is never read from a file.
        linecache.cache[place] = (sum(map(len, lines)), None, lines, place)
