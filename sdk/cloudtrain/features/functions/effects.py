"""What statements of a notebook do to the objects of names: what they set, delete and call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cloudtrain.features.functions.names import executed_nodes

_READERS: Final = frozenset(
    {
        *("print", "display", "len", "repr", "str", "type", "list", "tuple", "dict", "set", "sorted"),
        *("sum", "min", "max", "any", "all", "iter", "isinstance", "dir", "help", "vars", "id", "enumerate"),
    }
)  # fmt: skip
"""Functions that change nothing of what they are given."""
_SETTERS: Final = ("setattr", "delattr")


@dataclass(frozen=True)
class Effects:
    """What a statement does to the objects of names.

    Attributes:
        set: Names through which it assigns or deletes, such as `cfg.lr = 1`, with the number of steps: 1 here.
        used: Names whose methods it calls, and that it passes to a call without use of the result.
        calls: Names that it calls.
        passed: Names that it passes to calls.
        changes_arguments: Whether it is the body of a function that may change what it is given.
    """

    set: frozenset[tuple[str, int]]
    used: frozenset[str]
    calls: frozenset[str]
    passed: frozenset[str]
    changes_arguments: bool = False

    def changes(self, names: frozenset[str], *, is_definition: bool) -> bool:
        """Return whether it may change an object.

        Args:
            names: The names that lead to it.
            is_definition: Whether no call changes it.
        """
        if not is_definition and names & self.used:
            return True
        return any(each in names for each, _ in self.set)


def effects_of(statement: ast.stmt) -> Effects:
    """Return what a statement does that is executed; of a function, what its definition does."""
    return _effects(executed_nodes(statement))


def effects_of_body(function: ast.FunctionDef) -> Effects:
    """Return what a call of a function does to the names of its module."""
    nodes = [each for statement in function.body for each in ast.walk(statement)]
    shared = {name for each in nodes if isinstance(each, ast.Global) for name in each.names}
    own = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    own |= {
        each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    found = _effects(iter(nodes))
    hidden = own - shared
    return Effects(
        frozenset({each for each in found.set if each[0] not in hidden} | {(each, 0) for each in shared}),
        found.used - hidden,
        found.calls - hidden,
        found.passed - hidden,
        changes_arguments=any(each in hidden for each in {*found.used, *(one for one, _ in found.set)}),
    )  # fmt: skip


def _effects(nodes: Iterator[ast.AST]) -> Effects:
    through = set[tuple[str, int]]()
    used, calls, passed = set[str](), set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            through.add(_root(node))
        elif isinstance(node, ast.Call):
            used |= {_root(node.func)[0]} if _root(node.func)[1] else set()
            calls |= {node.func.id} if isinstance(node.func, ast.Name) else set()
            through |= {(each, 1) for each in _set_by_call(node)}
            passed |= set(_given(node))
        elif isinstance(node, ast.Expr):
            used |= set(_passed(node.value))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            # `@registry.register` may keep what it decorates.
            used |= {_root(each)[0] for each in node.decorator_list if _root(each)[1]}
    return Effects(
        set=frozenset(through - {("", 0)}),
        used=frozenset(used - {""}),
        calls=frozenset(calls),
        passed=frozenset(passed),
    )


def _root(node: ast.expr) -> tuple[str, int]:
    """Return the name at the begin of `name.a[0].b`, and the number of steps; an empty name without one."""
    steps = 0
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        steps += 1
    return (node.id, steps) if isinstance(node, ast.Name) else ("", 0)


def _set_by_call(call: ast.Call) -> Iterator[str]:
    is_setter = isinstance(call.func, ast.Name) and call.func.id in _SETTERS
    if is_setter and call.args and isinstance(call.args[0], ast.Name):
        yield call.args[0].id


def _passed(call: ast.expr) -> Iterator[str]:
    """Yield names that a call gets whose result is not used."""
    if isinstance(call, ast.Await):
        call = call.value
    if not isinstance(call, ast.Call):
        return
    if isinstance(call.func, ast.Name) and call.func.id in _READERS:
        return
    yield from _given(call)


def _given(call: ast.Call) -> Iterator[str]:
    given = [*call.args, *(each.value for each in call.keywords)]
    yield from (each.id for each in given if isinstance(each, ast.Name))


def touched_names(tree: ast.Module) -> frozenset[str]:
    """Return names whose objects anything in a module may change."""
    found = _effects(ast.walk(tree))
    return found.used | found.passed | {each for each, _ in found.set}
