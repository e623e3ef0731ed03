"""Libraries that the fork server imports for the ranks of a Task, because the Task's module begins with their import."""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LIBRARIES: Final = frozenset({"PIL", "numpy", "scipy", "sklearn"})
"""Libraries that start no threads when they are imported, and whose import does not depend on the rank.

Others may read RANK or LOCAL_RANK then, as torchmetrics does, and the server has none.
"""


def import_leading(module: str) -> None:
    """Import what the module of a Task imports before its first other statement, as far as it is of these libraries.

    Later imports may depend on statements before them, such as one that sets a variable.

    Args:
        module: Name of the module, which is below the working folder.
    """
    path = Path(*module.split(".")).with_suffix(".py")
    # The ranks report what is wrong with the file or a library.
    with contextlib.suppress(OSError, SyntaxError, ValueError, ImportError):
        for name in find_leading(path.read_bytes()):
            importlib.import_module(name)


def find_leading(source: bytes) -> Iterator[str]:
    """Yield the modules of these libraries that a source imports before its first other statement.

    Raises:
        SyntaxError, ValueError: It is no Python.
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            names = [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module or ""] if statement.level == 0 else []
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            # The docstring.
            continue
        else:
            return
        yield from (name for name in names if name.partition(".")[0] in _LIBRARIES)
