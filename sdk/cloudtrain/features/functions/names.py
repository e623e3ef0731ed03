"""The names that a piece of code takes from its module."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

_AT_ONCE = frozenset({"listcomp", "setcomp", "dictcomp", "genexpr"})
"""Scopes that are no functions."""


@dataclass(frozen=True)
class UsedNames:
    """The names that code takes from its module.

    Attributes:
        at_import: Those that it needs when it is executed: bases, decorators, defaults, class bodies, values.
        later: Those that its functions need when they are called.
        assigned: Those that it assigns with `global`.
    """

    at_import: frozenset[str]
    later: frozenset[str]
    assigned: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """All names that must be there."""
        return (self.at_import | self.later) - self.assigned


def used_names(source: str, *, is_lazy: bool = False) -> UsedNames:
    """Return the names that top-level statements take from their module, and do not define themselves.

    Args:
        source: The statements.
        is_lazy: Whether annotations are not evaluated.

    Raises:
        SyntaxError: It is not Python.
    """
    future = "from __future__ import annotations\n" if is_lazy else ""
    table = symtable.symtable(future + source, "cell", "exec")
    defined = {
        each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()
    }
    defined |= {each.get_name() for each in table.get_symbols() if each.is_namespace()}
    at_import = {each.get_name() for each in table.get_symbols() if each.is_referenced()}
    later, assigned = set[str](), set[str]()
    for child, is_called in _scopes(table):
        for each in child.get_symbols():
            if not each.is_global():
                continue
            if each.is_assigned():
                assigned.add(each.get_name())
            elif each.is_referenced():
                (later if is_called else at_import).add(each.get_name())
    return UsedNames(
        frozenset(at_import - defined), frozenset(later - defined), frozenset(assigned)
    )


def _scopes(
    table: symtable.SymbolTable, *, is_called: bool = False
) -> Iterator[tuple[symtable.SymbolTable, bool]]:
    """Yield the scopes in a scope, and whether they are executed at a call."""
    for child in table.get_children():
        if child.get_type() == "annotation":
            continue
        is_function = child.get_type() == "function" and child.get_name() not in _AT_ONCE
        inner = is_called or is_function
        yield child, inner
        yield from _scopes(child, is_called=inner)


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement binds, also in its branches and loops."""
    for node in executed_nodes(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name


def executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and the nodes in it that are executed with it, without the bodies of functions and classes."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for decorator in node.decorator_list:
            yield from executed_nodes(decorator)
        return
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        # What they bind is their own.
        yield from (each for each in ast.walk(node) if not _is_store(each))
        return
    for each in ast.iter_child_nodes(node):
        yield from executed_nodes(each)


def _is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def called_names(statement: ast.stmt) -> frozenset[str]:
    """Return names that a statement may call when it is executed: of a definition, decorators and calls beside them."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset(each.id for each in ast.walk(statement) if isinstance(each, ast.Name))
    nodes: list[ast.AST] = list(statement.decorator_list)
    found = {each.id for one in nodes for each in ast.walk(one) if isinstance(each, ast.Name)}
    if isinstance(statement, ast.ClassDef):
        nodes = [each for one in statement.body for each in executed_nodes(one)]
    else:
        nodes = list(ast.walk(statement.args))
    for call in (each for each in nodes if isinstance(each, ast.Call)):
        found |= {each.id for each in ast.walk(call) if isinstance(each, ast.Name)}
    if isinstance(statement, ast.ClassDef):
        for each in statement.body:
            found |= (
                called_names(each) if isinstance(each, ast.FunctionDef | ast.ClassDef) else set()
            )
    return frozenset(found)


def inner_statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement and those in its branches, loops and blocks, without the bodies of functions and classes."""
    yield from (each for each in executed_nodes(statement) if isinstance(each, ast.stmt))
