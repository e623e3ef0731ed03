"""Python sources of a job: the files of modules, and their syntax trees. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import tokenize
import warnings
from pathlib import Path


def find_module(directory: Path, module: str) -> Path | None:
    """Return the file of a module below a code folder, or None."""
    name = module.replace(".", "/")
    # A package hides a module.
    for candidate in (directory / name / "__init__.py", directory / f"{name}.py"):
        try:
            if candidate.is_file():
                return candidate
        except (OSError, ValueError):
            # No file system takes the name.
            continue
    return None


def read_text(path: Path) -> str:
    """Return a source in the encoding that it declares.

    Raises:
        OSError: It cannot be read.
        SyntaxError: It declares an unknown encoding.
        ValueError: It is not in its encoding.
    """
    with tokenize.open(path) as file:
        return file.read()


def read_tree(path: Path) -> ast.Module | None:
    """Return a file's syntax tree; None if it cannot be read or parsed."""
    try:
        return parse_text(read_text(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# A plan reads the same source for several checks, and that of a sweep for each of its 200 samples.
@functools.lru_cache(maxsize=32)
def parse_text(text: str) -> ast.Module:
    """Return the syntax tree of a source. Callers share it, and must not change it.

    Raises:
        SyntaxError, ValueError: It is not valid Python.
    """
    with warnings.catch_warnings():
        # Such as one about an invalid escape sequence in the user's text.
        warnings.simplefilter("ignore")
        return ast.parse(text)
