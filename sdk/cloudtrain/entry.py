"""The Task that a job names, read as source text: nothing of it is imported."""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.errors import did_you_mean

Finding = tuple[tuple[str, ...], str, str]
"""Path of the field, message, hint."""


def find_module(directory: Path, module: str) -> Path | None:
    """Return the file of a module below a code folder, or None."""
    name = module.replace(".", "/")
    for candidate in (directory / f"{name}.py", directory / name / "__init__.py"):
        try:
            if candidate.is_file():
                return candidate
        except OSError:  # a name that no file system takes
            continue
    return None


def check_task(path: Path, class_name: str, arguments: Mapping[str, Any]) -> list[Finding]:
    """Return what is wrong with a Task and its arguments, as (field, message, hint).

    Only what the text proves: a class that is imported or built otherwise is left to the run itself.
    """
    tree = _parse(path, ("code", "task"))
    if isinstance(tree, list):
        return tree
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name in classes:
        return _check_arguments(classes[class_name], arguments)
    if class_name in _other_names(tree) or _has_star_import(tree):
        return []
    hint = did_you_mean(class_name, list(classes)) if classes else "the file has no class"
    return [(("code", "task"), f"{path.name} has no class {class_name}", hint)]


def check_syntax(path: Path, at: tuple[str, ...]) -> list[Finding]:
    """Return what keeps Python from reading a file."""
    tree = _parse(path, at)
    return tree if isinstance(tree, list) else []


def _parse(path: Path, at: tuple[str, ...]) -> ast.Module | list[Finding]:
    """Return a file's syntax tree, or what keeps Python from reading it."""
    try:
        with tokenize.open(path) as file:  # heeds a byte-order mark and an encoding named in the first lines
            return ast.parse(file.read())
    except OSError as error:
        return [(at, f"{path} cannot be read: {error.strerror}", "make the file readable")]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}{f':{line}' if line else ''}"
        version = ".".join(map(str, sys.version_info[:2]))
        hint = f"mend it, or, where it needs a newer Python than this {version}, run cloudtrain with that one"
        return [(at, f"{place} is not valid Python: {error}", hint)]


def _check_arguments(definition: ast.ClassDef, arguments: Mapping[str, Any]) -> list[Finding]:
    found = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    # Without an __init__ of its own it may inherit one; with a decorator the signature may be another.
    if not found or found[0].args.kwarg is not None or found[0].decorator_list or definition.decorator_list:
        return []
    signature = found[0].args
    positional = [argument.arg for argument in (*signature.posonlyargs, *signature.args)][1:]
    keyword = [argument.arg for argument in signature.kwonlyargs]
    legal = positional + keyword
    optional = positional[len(positional) - len(signature.defaults) :] if signature.defaults else []
    optional += [name for name, default in zip(keyword, signature.kw_defaults, strict=True) if default is not None]
    problems: list[Finding] = [
        (
            ("code", "args", str(name)),
            f"{definition.name} takes no such argument",
            did_you_mean(str(name), legal) if legal else "it takes none: remove args",
        )
        for name in arguments
        if name not in legal
    ]
    problems += [
        (("code", "args"), f"{definition.name} needs the argument {name}", f"args: {{{name}: ...}}")
        for name in legal
        if name not in optional and name not in arguments
    ]
    return problems


def _other_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds anywhere, by import or assignment."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
    return names


def _has_star_import(tree: ast.Module) -> bool:
    return any(alias.name == "*" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
