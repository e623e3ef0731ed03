"""How a decorated function is distinguished from others, in values and in source."""

from __future__ import annotations

import ast
import functools
import types
from typing import Any

from cloudtrain.features.functions.cells import UNREAD, ExecutedCode

_DEEPEST = 5
_MARKS = list[Any]()
"""The function `cloudtrain.remote`, once it is imported."""


class Remote:
    """Base of a decorated function.

    Attributes:
        function: The function as it was written.
    """

    function: Any


class RemoteDecorator:
    """Base of what `cloudtrain.remote(...)` returns."""


def mark(function: Any) -> None:
    """Name a function that decorates as `cloudtrain.remote` does."""
    _MARKS.append(function)


def function_of(value: Any) -> Any:
    """Return the function that was decorated; anything else as it is."""
    return value.function if isinstance(value, Remote) else value


def is_remote_decorator(node: ast.expr, code: ExecutedCode) -> bool:
    """Return whether a decorator is `cloudtrain.remote` under any name, with or without arguments."""
    return _is_mark(_value_of(node, code)) or _says_remote(node, code, 0)


def _is_mark(value: Any) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    return any(value is each for each in _MARKS) or isinstance(value, RemoteDecorator)


def _value_of(node: ast.expr, code: ExecutedCode) -> Any:
    """Return what a decorator's name has, without its call."""
    if isinstance(node, ast.Call):
        return _value_of(node.func, code)
    if isinstance(node, ast.Name):
        return code.names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, code)
        # An attribute of another object may be computed.
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
    return None


def _says_remote(node: ast.expr, code: ExecutedCode, depth: int) -> bool:
    """Return whether the source says so, of a notebook that was not executed."""
    if isinstance(node, ast.Call):
        given = [node.func, *node.args[:1]]
        return any(_says_remote(each, code, depth) for each in given)
    if ast.unparse(node) == "cloudtrain.remote":
        return True
    root = node.value if isinstance(node, ast.Attribute) else node
    if not isinstance(root, ast.Name) or depth > _DEEPEST:
        return False
    if code.names.get(root.id, UNREAD) is not UNREAD:
        return False
    found = code.find_binding(root.id)
    if found is None:
        return ast.unparse(node) in ("remote", "ct.remote")
    return _binds_remote(found[1], node, root.id, code, depth)


def _binds_remote(
    statement: ast.stmt, node: ast.expr, name: str, code: ExecutedCode, depth: int
) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "cloudtrain" and any(
            each.name == "remote" and (each.asname or each.name) == name for each in statement.names
        )
    if isinstance(statement, ast.Import):
        is_ours = any(
            each.name == "cloudtrain" and (each.asname or each.name) == name
            for each in statement.names
        )
        return is_ours and isinstance(node, ast.Attribute) and node.attr == "remote"
    value = getattr(statement, "value", None)
    return isinstance(value, ast.expr) and _says_remote(value, code, depth + 1)
