"""Cells that were executed in this process as a kernel executes them, and the module that is sent from them."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.features.functions.cells import Cell, ExecutedCode
from cloudtrain.features.functions.collecting import collect
from cloudtrain.features.functions.pieces import Collection
from cloudtrain.features.functions.remote_mark import function_of
from cloudtrain.features.functions.writing import write_module

_NUMBERS = itertools.count()


def execute(*sources: str, folder: Path | None = None) -> ExecutedCode:
    """Execute cells; one that raises an error ends there, as in a notebook."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    cells = list[Cell]()
    for number, source in enumerate(sources, start=1):
        cell = Cell.read(f"cell [{number}]", number, source)
        assert cell is not None, source
        cells.append(cell)
        file = f"<executed {next(_NUMBERS)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with contextlib.suppress(ZeroDivisionError):
            exec(compile(source, file, "exec"), names)  # noqa: S102 (the test's own code)
    return ExecutedCode("x.ipynb", names, tuple(cells), folder or Path.cwd())


def collected(code: ExecutedCode, name: str = "f") -> Collection:
    """Return what is sent for a function."""
    return collect(code.names[name], name, code)


def value_here(code: ExecutedCode, name: str = "f") -> Any:
    """Return what the function returns in the kernel."""
    return function_of(code.names[name])()


@contextlib.contextmanager
def sent_module(code: ExecutedCode, name: str = "f") -> Iterator[types.ModuleType]:
    """Execute the module that a run has."""
    text = write_module(collected(code, name), code.title, is_lazy=code.is_lazy)
    module = types.ModuleType("sent_cells")
    sys.modules["sent_cells"] = module
    try:
        exec(compile(text, "sent_cells.py", "exec"), vars(module))  # noqa: S102
        yield module
    finally:
        del sys.modules["sent_cells"]
