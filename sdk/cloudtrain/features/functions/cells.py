"""The code that was executed in this process: the cells of a notebook, or the file of a script."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from cloudtrain.features.functions.local_modules import installed_places
from cloudtrain.features.functions.names import bound_names, inner_statements

_VSCODE = "__vsc_ipynb_file__"
_JUPYTER = "JPY_SESSION_NAME"
"""What VS Code and Jupyter say of the notebook's file."""
RUNNING_MAGICS: Final = ("time", "capture")
"""Magics of cells that execute the cell in the notebook."""
_MAGIC: Final = re.compile(
    r"\s*%%?[A-Za-z]\w*(\s|$)|\s*!{1,2}\s*\S|\s*\?|\s*[\w.%]+\?{1,2}\s*$|\s*[\w, ]+=\s*(!|%[A-Za-z])"
)
"""Lines for IPython: magics, commands of the shell, questions. `% n)` continues an expression."""
UNREAD: Final = object()
"""The value of a name of a notebook that was not executed."""


@dataclass(frozen=True)
class Cell:
    """Code that was executed.

    Attributes:
        place: What messages call it: `cell [3]`, or the name of a file.
        order: Its place in the order of execution.
        source: Its code.
        statements: Its statements at the top level.
        is_file: Whether it is a file.
    """

    place: str
    order: int
    source: str
    statements: tuple[ast.stmt, ...] = field(repr=False, compare=False, default=())
    is_file: bool = False

    @classmethod
    def read(cls, place: str, order: int, source: str, *, is_file: bool = False) -> Cell | None:
        """Return the cell; None where the code is not Python, and so has defined nothing."""
        try:
            body = tuple(ast.parse(source).body)
            inner = _code_of_magic(body)
            if inner is not None:
                return cls(place, order, inner, tuple(ast.parse(inner).body), is_file)
        except (SyntaxError, ValueError):
            return None
        return cls(place, order, source, body, is_file)

    def statement_at(self, line: int, name: str) -> ast.stmt | None:
        """Return the statement with a line that binds a name: the innermost, which may be in a branch or block."""
        found = [
            each
            for outer in self.statements
            for each in inner_statements(outer)
            if first_line(each) <= line <= (each.end_lineno or each.lineno)
            and name in bound_names(each)
        ]
        return found[-1] if found else None

    def last_binding(self, name: str) -> ast.stmt | None:
        """Return the last top-level statement that binds a name."""
        return next((each for each in reversed(self.statements) if name in bound_names(each)), None)

    def code_of(self, statement: ast.stmt, omitted: Sequence[ast.expr] = ()) -> tuple[int, str]:
        """Return the first line of a statement and its code, with its decorators.

        Args:
            statement: The statement.
            omitted: Decorators that are left out.
        """
        kept = [each for each in _decorators(statement) if each not in omitted]
        first = min([statement.lineno, *(each.lineno for each in kept)])
        lines = self.source.splitlines()[first - 1 : statement.end_lineno]
        # Other statements may stand in its lines, with semicolons.
        lines[-1] = lines[-1].encode()[: statement.end_col_offset].decode()
        for each in omitted:
            for number in range(each.lineno, (each.end_lineno or each.lineno) + 1):
                if number >= first:
                    lines[number - first] = ""
        before = self.source.splitlines()[first - 1].encode()[: statement.col_offset]
        if statement.col_offset and not before.strip():
            # A statement of a branch or block keeps its indentation: a text in it may have several lines.
            return first - 1, "\n".join(["if True:", *lines]) + "\n"
        if not kept:
            lines[0] = lines[0].encode()[statement.col_offset :].decode()
        return first, "\n".join(lines) + "\n"


def _code_of_magic(body: Sequence[ast.stmt]) -> str | None:
    """Return the code that a cell such as `%%time` executes; None for a cell of another kind."""
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".run_cell_magic"):
        return None
    name, *_, code = [each.value for each in call.args if isinstance(each, ast.Constant)] or [
        ""
    ] * 2
    return without_magics(str(code)) if name in RUNNING_MAGICS else None


def without_magics(source: str) -> str:
    """Return a cell without the lines for IPython; the others keep their numbers."""
    with contextlib.suppress(SyntaxError, ValueError):
        # What is Python has none.
        ast.parse(source)
        return source
    return "\n".join("" if _MAGIC.match(line) else line for line in source.splitlines()) + "\n"


def _decorators(statement: ast.stmt) -> Sequence[ast.expr]:
    return getattr(statement, "decorator_list", ())


def first_line(statement: ast.stmt) -> int:
    """Return the first line of a statement with its decorators."""
    return min([statement.lineno, *(each.lineno for each in _decorators(statement))])


@dataclass(frozen=True)
class ExecutedCode:
    """The names of a module and the code that made them.

    Attributes:
        title: What messages call it: the notebook's file, `notebook` if it is unknown, or the script's file.
        names: The module's names.
        cells: Its code in the order of execution.
        folder: Where its own modules are found.
    """

    title: str
    names: Mapping[str, Any] = field(repr=False)
    cells: tuple[Cell, ...] = field(repr=False)
    folder: Path = field(default_factory=Path.cwd)

    @property
    def is_lazy(self) -> bool:
        """Whether annotations are not evaluated, from the cell on that says so."""
        return any(
            isinstance(each, ast.ImportFrom) and each.module == "__future__"
            for cell in self.cells
            for each in cell.statements
        )

    def cell_of_code(self, filename: str) -> Cell | None:
        """Return the newest cell that was compiled under a file name."""
        source = "".join(linecache.getlines(filename))
        if not source.strip():
            return None
        for each in reversed(self.cells):
            if each.source.strip("\n") == source.strip("\n"):
                return each
        return None

    def find_binding(self, name: str) -> tuple[Cell, ast.stmt] | None:
        """Return the newest cell that binds a name at its top level, and the statement."""
        for each in reversed(self.cells):
            found = each.last_binding(name)
            if found is not None:
                return each, found
        return None


def executed_code() -> ExecutedCode:
    """Return the code of the running notebook, or of the script that Python runs."""
    main = sys.modules["__main__"]
    names = vars(main)
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        cells = [
            Cell.read(f"cell [{number}]", number, source)
            for number, source in enumerate(shell.history_manager.input_hist_parsed)
        ]
        return ExecutedCode(_notebook_title(names), names, tuple(each for each in cells if each))
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        return ExecutedCode("this session", names, ())
    file = Path(path)
    cell = Cell.read(file.name, 0, file.read_text(encoding="utf-8", errors="replace"), is_file=True)
    return ExecutedCode(file.name, names, (cell,) if cell else (), file.resolve().parent)


def _notebook_title(names: Mapping[str, Any]) -> str:
    found = names.get(_VSCODE) or os.environ.get(_JUPYTER) or ""
    return Path(str(found)).name or "the notebook"


def module_name(title: str, folder: Path) -> str:
    """Return the name of the module with the code of a notebook or script.

    It is the same in each process: what a kernel has loaded does not count.

    Args:
        title: What messages call the notebook or script.
        folder: Where its own modules are found.
    """
    stem = title.partition(".")[0] if "." in title else "notebook"
    name = re.sub(r"\W+", "_", stem, flags=re.ASCII).strip("_").lower() or "notebook"
    if name[0].isdigit():
        name = f"notebook_{name}"
    while _is_taken(name, title, folder):
        name = f"{name}_code"
    return name


def _is_taken(name: str, title: str, folder: Path) -> bool:
    """Return whether a name is that of a library, or of something beside the notebook."""
    file = f"{name}.py"
    is_beside = (folder / name).is_dir() or (file != title and (folder / file).is_file())
    return is_beside or name in sys.stdlib_module_names or _is_installed(name)


def _is_installed(name: str) -> bool:
    return PathFinder.find_spec(name, sorted(installed_places())) is not None
