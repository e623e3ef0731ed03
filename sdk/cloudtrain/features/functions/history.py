"""The order in which statements of a notebook bound and changed its names."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cloudtrain.features.functions.cells import Cell, ExecutedCode, first_line
from cloudtrain.features.functions.effects import Effects, effects_of, effects_of_body
from cloudtrain.features.functions.names import bound_names, inner_statements


@dataclass(frozen=True, eq=False)
class Moment:
    """A statement at the top level that was executed.

    Attributes:
        index: Its place in the order of execution.
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
    """The statements of a notebook in the order of their execution.

    Attributes:
        moments: The statements at the top level.
    """

    def __init__(self, code: ExecutedCode) -> None:
        pairs = [(cell, each) for cell in code.cells for each in cell.statements]
        self.moments = [Moment(index, *each) for index, each in enumerate(pairs)]
        self._bound = [frozenset(bound_names(each.statement)) for each in self.moments]

    def moment_of(self, cell: Cell, statement: ast.stmt) -> Moment | None:
        """Return when a statement was executed, which may be in a branch of one at the top level."""
        for each in self.moments:
            if each.cell is cell and any(
                one is statement for one in inner_statements(each.statement)
            ):
                return each  # fmt: skip
        return None

    def bindings(self, name: str) -> list[Moment]:
        """Return the statements that bind a name."""
        return [each for each in self.moments if name in self._bound[each.index]]

    def rebinding(self, name: str, after: Moment) -> Moment | None:
        """Return a later statement that may have given a name another value: equal definitions and imports do not."""
        for each in self.bindings(name):
            if each.index > after.index and not self._is_equal(name, each, after):
                return each
        return None

    def change(self, names: Iterable[str], after: Moment, *, is_definition: bool) -> Moment | None:
        """Return a later statement that may have changed an object.

        Args:
            names: The names that lead to it.
            after: The statement that made it.
            is_definition: Whether it is a module, function or class, or a number: no call changes it.
        """
        wanted = frozenset(names)
        for each in self.moments[after.index + 1 :]:
            effects, called = self._effects(each), list(self._called(each))
            if any(one.changes(wanted, is_definition=is_definition) for one in (effects, *called)):
                return each
            is_given = not is_definition and bool(wanted & effects.passed)
            if is_given and any(one.changes_arguments for one in called):
                return each
        return None

    def changes_of(self, name: str) -> Iterator[tuple[Moment, int]]:
        """Yield the statements that assign through a name, with the number of steps: 1 for `name.x = 1`."""
        for moment in self.moments:
            yield from (
                (moment, steps) for each, steps in self._effects(moment).set if each == name
            )

    def _is_equal(self, name: str, later: Moment, after: Moment) -> bool:
        before = [each for each in self.bindings(name) if each.index < after.index]
        statement = later.statement
        if not before:
            return False
        origin = _origin(statement, name)
        if origin is not None and origin == _origin(before[-1].statement, name):
            return True
        if ast.dump(before[-1].statement) != ast.dump(statement):
            return False
        kinds = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
        return isinstance(statement, kinds) or _is_literal(statement)

    def _effects(self, moment: Moment) -> Effects:
        return self._every_effect[moment.index]

    @functools.cached_property
    def _every_effect(self) -> list[Effects]:
        return [effects_of(each.statement) for each in self.moments]

    def _called(self, moment: Moment) -> Iterator[Effects]:
        """Yield what the notebook's own functions do that a statement calls."""
        waiting, seen = set(self._effects(moment).calls), set[str]()
        while waiting:
            name = waiting.pop()
            seen.add(name)
            for function in self._functions.get(name, ()):
                effects = effects_of_body(function)
                yield effects
                waiting |= effects.calls - seen

    @functools.cached_property
    def _functions(self) -> dict[str, list[ast.FunctionDef]]:
        found = dict[str, list[ast.FunctionDef]]()
        for moment in self.moments:
            for each in inner_statements(moment.statement):
                # A decorated function may be one that runs elsewhere.
                if isinstance(each, ast.FunctionDef) and not each.decorator_list:
                    found.setdefault(each.name, []).append(each)
        return found


def _is_literal(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if value is None:
        return False
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True


def _origin(statement: ast.stmt, name: str) -> tuple[str, str] | None:
    """Return what a statement imports under a name."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return None
    module = getattr(statement, "module", None) or ""
    for each in statement.names:
        if each.asname == name:
            return module, each.name
        if each.asname is None and each.name.partition(".")[0] == name:
            return module, name
    return None
