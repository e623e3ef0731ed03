"""Nodes and names in syntax trees of Python: what a module imports, and what an expression refers to."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from weakref import WeakKeyDictionary

_nodes: WeakKeyDictionary[ast.Module, list[ast.AST]] = WeakKeyDictionary()
"""The nodes below each module that was looked at, which many rules do."""


def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes below a module, in the order of `ast.walk`. It is walked once."""
    found = _nodes.get(tree)
    if found is None:
        found = _nodes[tree] = [node for node in ast.walk(tree) if node is not tree]
    return found


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a module imports, by the names under which it does."""
    found = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                found[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def full_name(expression: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the name that an expression has by a module's imports, such as `torch.distributed.all_gather`."""
    root, _, rest = _written(expression).partition(".")
    return f"{imported.get(root, '')}.{rest}".rstrip(".")


def _written(expression: ast.expr) -> str:
    """Return an expression as text. Names with dots, which most are, need no unparsing."""
    parts: list[str] = []
    inner = expression
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        return ast.unparse(expression)
    return ".".join([inner.id, *reversed(parts)])


def last_name(node: ast.AST) -> str:
    """Return the last part of the name that an expression refers to; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
