"""Files that a program surely reads, by its source: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from cloudtrain.job.static_analysis.syntax import Module, last_name
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_READING = lazy_pattern(r"open|read_\w+|load|loads?_\w+|loadtxt|genfromtxt|imread|from_file")
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
            is_reading = _is_reading(call)
            for path in _paths(call, is_reading=is_reading):
                if is_reading:
                    found.setdefault(path, module.place(call.lineno))
                elif last_name(call.func) != "Path":
                    optional.add(path)
    return {path: place for path, place in found.items() if path not in optional}


def _is_reading(call: ast.Call) -> bool:
    name = last_name(call.func)
    if name != "open":
        return _READING.fullmatch(name) is not None
    words = call.args if _path_of(call) is not None else call.args[1:]
    words = [*words, *(word.value for word in call.keywords if word.arg == "mode")]
    if not words:
        return True
    mode = words[0]
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return False
    return not _WRITING_MODES & set(mode.value)


def _path_of(call: ast.Call) -> ast.Call | None:
    """Return the `Path(...)` whose method a call is: that of `Path("a").open()`; None for other calls."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner if isinstance(owner, ast.Call) and last_name(owner.func) == "Path" else None


def _paths(call: ast.Call, *, is_reading: bool) -> Iterator[str]:
    """Yield the paths that are written out as a call's arguments, or as that of the Path whose method it is.

    Only the first argument of a call that reads is a path.
    """
    words = (_path_of(call) or call).args
    for word in words[:1] if is_reading else words:
        if isinstance(word, ast.Call) and last_name(word.func) == "Path" and word.args:
            yield from _text(word.args[0])
        else:
            yield from _text(word)


def _text(word: ast.expr) -> Iterator[str]:
    if isinstance(word, ast.Constant) and isinstance(word.value, str):
        yield word.value.removeprefix("./")
