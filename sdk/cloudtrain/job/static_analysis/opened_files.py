"""Files that a program surely reads, by its source: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from cloudtrain.job.static_analysis.syntax import Module, last_name

_READING = re.compile(r"open|read_\w+|load|loads?_\w+|loadtxt|genfromtxt|imread|from_file")
_WRITING_MODES = frozenset("wxa+")


def opened_files(modules: Iterable[Module]) -> dict[str, str]:
    """Return the places (`file:line`) that open a file whose path is written out, by path.

    A path that is also in another call, such as one that writes to it or asks if it exists, does not count: the program
    can do without the file.

    Args:
        modules: The modules of a program.
    """
    found: dict[str, str] = {}
    optional: set[str] = set()
    for module in modules:
        for call in sorted(module.calls, key=lambda call: call.lineno):
            paths = [_text(word) for word in call.args]
            if not _is_reading(call):
                optional.update(paths)
            elif paths and paths[0]:
                found.setdefault(paths[0], module.place(call.lineno))
    return {path: place for path, place in found.items() if path not in optional}


def _is_reading(call: ast.Call) -> bool:
    """Return whether a call reads the file that its first argument names."""
    name = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        # A method of what another call returns, such as Path("a").open(): its argument is no path.
        return False
    if name != "open":
        return _READING.fullmatch(name) is not None
    words = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "mode")]
    if not words:
        return True
    mode = _text(words[0])
    return mode != "" and not _WRITING_MODES & set(mode)


def _text(word: ast.expr) -> str:
    """Return a text that is written out; empty for other expressions."""
    if isinstance(word, ast.Constant) and isinstance(word.value, str):
        return word.value.removeprefix("./")
    return ""
