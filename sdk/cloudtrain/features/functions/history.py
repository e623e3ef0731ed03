"""The statements of a notebook that was not executed, in their order: what they bind, and what they change."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cloudtrain.features.functions.cells import Cell, ExecutedCode, first_line
from cloudtrain.features.functions.names import bound_names, inner_statements

CONSTANTS = (bool, int, float, complex, str, bytes)
"""Types of values that nothing changes."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, eq=False)
class Moment:
    """A statement at the top level.

    Attributes:
        index: Its place in the order.
        cell: Its cell.
        statement: The statement.
    """

    index: int
    cell: Cell
    statement: ast.stmt

    def __str__(self) -> str:
        line = first_line(self.statement)
        return f"{self.cell.place}, line {line}" if line > 1 else self.cell.place


class History:
    """The statements of a notebook in their order.

    Attributes:
        moments: The statements at the top level.
    """

    def __init__(self, code: ExecutedCode) -> None:
        pairs = [(cell, each) for cell in code.cells for each in cell.statements]
        self.moments = [Moment(index, *each) for index, each in enumerate(pairs)]

    def moment_of(self, statement: ast.stmt) -> Moment:
        """Return the statement at the top level that has this one in itself or in a branch."""
        return next(
            each
            for each in self.moments
            if any(one is statement for one in inner_statements(each.statement))
        )

    def bindings(self, name: str) -> list[Moment]:
        """Return the statements that bind a name."""
        return [each for each in self.moments if name in bound_names(each.statement)]

    def change(self, name: str, made: Moment) -> Moment | None:
        """Return a statement that may have changed what a statement has made."""
        value = getattr(made.statement, "value", None)
        if isinstance(value, ast.Constant):
            return None
        is_definition = isinstance(made.statement, _DEFINITIONS)
        # A method of an attribute may change it: `Config.layers.append(3)`. That of a module is a function.
        steps = 2 if isinstance(made.statement, ast.ClassDef) else 1
        for each in self.moments:
            touched = _touched(each.statement, None if is_definition and steps == 1 else steps)
            if each is not made and name in touched:
                return each
        return None

    def change_of_used(self, names: Iterable[str], made: Moment) -> tuple[str, Moment] | None:
        """Return a name that a statement uses, and the later statement that binds it anew or may have changed it."""
        for name in sorted(names):
            bindings = self.bindings(name)
            before = [each for each in bindings if each.index < made.index]
            for each in bindings:
                if each.index > made.index and before and not _is_equal(each, before[-1]):
                    return name, each
            change = self.change(name, before[-1]) if before else None
            if change is not None and change is not made:
                return name, change
        return None


def _is_equal(one: Moment, other: Moment) -> bool:
    return ast.dump(one.statement) == ast.dump(other.statement)


def _touched(statement: ast.stmt, steps: int | None) -> Iterator[str]:
    """Yield names whose objects a statement may change.

    Args:
        statement: It, with the bodies of functions in it.
        steps: Attributes up to a method whose call may change the object: 1 for `name.append(1)`; None if no call does.
    """
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _root(node)
        elif isinstance(node, ast.Call) and _root(node.func) in ("setattr", "delattr"):
            yield from map(_root, node.args[:1])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_enough = steps is not None and _count_steps(node.func) >= steps
            yield from (_root(node.func),) if is_enough else ()
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and steps == 1:
            yield from map(_root, node.value.args)


def _root(node: ast.expr) -> str:
    """Return the name at the begin of `name.a[0].b`; an empty text without one."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _count_steps(node: ast.expr) -> int:
    steps = 0
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        steps += 1
    return steps


def changed_settings(code: ExecutedCode, name: str) -> Iterator[str]:
    """Yield the cells that set an attribute of a module, such as `torch.backends.cudnn.benchmark = True`."""
    for cell in code.cells:
        nodes = [node for each in cell.statements for node in ast.walk(each)]
        is_set = any(
            isinstance(node, ast.Attribute | ast.Subscript)
            and not isinstance(node.ctx, ast.Load)
            and _root(node) == name
            for node in nodes
        )
        if is_set:
            yield cell.place
