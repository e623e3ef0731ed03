"""Whether the local modules that a notebook has loaded are still those of their files, which the run reads."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.errors import Problem
from cloudtrain.features.functions.effects import touched_names
from cloudtrain.features.functions.local_modules import LocalModules

_CONTAINERS = (list, dict, set, tuple)
_PLAIN = (bool, int, float, str, bytes, type(None))


def changed_modules(local: LocalModules) -> Iterator[Problem]:
    """Yield a problem for each loaded module that has another function or constant than its file.

    Args:
        local: The files that travel.
    """
    files = {*local.files, *(each for one in local.packages for each in one.rglob("*.py"))}
    texts = {each.resolve(): each.read_text(encoding="utf-8", errors="replace") for each in files}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__main__" or path is None or Path(path).resolve() not in texts:
            continue
        others = "\n".join(text for each, text in texts.items() if each != Path(path).resolve())
        part = _changed_part(module, Path(path), others)
        if part is not None:
            message = f"{name} was loaded with another {part} than {Path(path).name} has now"
            hint = f"importlib.reload({name}), or restart the kernel"
            yield Problem(str(path), None, None, "", message, hint)


def _changed_part(module: types.ModuleType, path: Path, others: str) -> str | None:
    """Return a function or constant that differs between a module and its file, and that no other file names."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        whole = compile(source, str(module.__file__), "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError, RecursionError):
        # The run reports it with its line.
        return None
    codes = set(_codes(whole))
    for name, value in vars(module).items():
        for function in _functions(value, module.__name__):
            if function.__code__ not in codes:
                return name
    for name, expected in _constants(tree).items():
        actual = vars(module).get(name)
        is_known = type(actual) in (*_PLAIN, *_CONTAINERS) and name not in others
        if is_known and actual != expected:
            return name
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _functions(value: Any, module: str) -> Iterator[types.FunctionType]:
    """Yield a function of a module, or the methods of a class of it, whose code is in its file."""
    if getattr(value, "__module__", None) != module:
        return
    for each in vars(value).values() if isinstance(value, type) else [value]:
        is_of_file = isinstance(each, types.FunctionType) and each.__module__ == module
        if is_of_file and not hasattr(each, "__wrapped__") and _is_in_file(each):
            yield each


def _is_in_file(function: types.FunctionType) -> bool:
    module = sys.modules[function.__module__]
    return function.__code__.co_filename == module.__file__


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return constants that a file assigns once and that nothing in it changes."""
    found = dict[str, Any]()
    for each in tree.body:
        if not isinstance(each, ast.Assign) or not isinstance(each.targets[0], ast.Name):
            continue
        try:
            found[each.targets[0].id] = ast.literal_eval(each.value)
        except (ValueError, TypeError):
            continue
    touched = touched_names(tree)
    found = {
        name: value for name, value in found.items() if type(value) in _PLAIN or name not in touched
    }
    bound = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]  # fmt: skip
    changed = {
        name for each in ast.walk(tree) if isinstance(each, ast.Global) for name in each.names
    }
    changed |= {each for each in found if bound.count(each) > 1}
    return {name: value for name, value in found.items() if name not in changed}
