"""Names in syntax trees of Python: what a module imports, and what an expression refers to."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a module imports, by the names under which it does."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                found[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def full_name(expression: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the name that an expression has by a module's imports, such as `torch.distributed.all_gather`."""
    root, _, rest = ast.unparse(expression).partition(".")
    return f"{imported.get(root, '')}.{rest}".rstrip(".")


def last_name(node: ast.AST) -> str:
    """Return the last part of the name that an expression refers to; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
