"""Whether a function or class still has what its definition says: defaults and class attributes."""

from __future__ import annotations

import abc
import ast
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudtrain.features.functions.cells import UNREAD
from cloudtrain.features.functions.literals import Expression
from cloudtrain.features.functions.names import bound_names

Write = Callable[[Any], Expression | None]


def changed_part(
    value: Any, statement: ast.stmt, names: Mapping[str, Any], write: Write
) -> str | None:
    """Return what a function or class has otherwise than its definition would give it now; None if nothing.

    Args:
        value: The function or class.
        statement: Its definition.
        names: Names of the notebook, as they are now.
        write: Writes a value as an expression.
    """
    comparison = _Comparison(names, write)
    if isinstance(value, type) and isinstance(statement, ast.ClassDef):
        return next(comparison.of_class(value, statement), None)
    function = _definition_of(statement)
    if isinstance(value, types.FunctionType) and function is not None:
        return next(comparison.of_function(value, function), None)
    return None


def _definition_of(statement: ast.stmt) -> ast.arguments | None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.args
    value = getattr(statement, "value", None)
    return value.args if isinstance(value, ast.Lambda) else None


class _Comparison:
    def __init__(self, names: Mapping[str, Any], write: Write) -> None:
        self._names = names
        self._write = write

    def of_function(self, value: types.FunctionType, written: ast.arguments) -> Iterator[str]:
        """Yield the defaults that differ."""
        positional = [*written.posonlyargs, *written.args]
        defaults = written.defaults
        named = [each.arg for each in positional[len(positional) - len(defaults) :]]
        for name, node, actual in zip(named, defaults, value.__defaults__ or (), strict=False):
            if not self._is_same(actual, node):
                yield f"the default of {name}"
        for each, default in zip(written.kwonlyargs, written.kw_defaults, strict=True):
            actual = (value.__kwdefaults__ or {}).get(each.arg)
            if default is not None and not self._is_same(actual, default):
                yield f"the default of {each.arg}"

    def of_class(self, value: type, statement: ast.ClassDef) -> Iterator[str]:
        """Yield the attributes that differ, those of methods included."""
        if type(value) not in (type, abc.ABCMeta):
            # Its class makes something else of the attributes, as that of an enumeration does.
            return
        has = vars(value)
        for name, node in _assigned(statement).items():
            actual = has.get(name, UNREAD)
            if actual is not UNREAD and hasattr(type(actual), "__get__"):
                continue
            if actual is UNREAD and statement.decorator_list:
                continue
            if not self._is_same(actual, node):
                yield f"its attribute {name}"
        yield from self._of_methods(value, statement)
        if statement.decorator_list:
            return
        known = {each for part in statement.body for each in bound_names(part)}
        for each, actual in has.items():
            is_slot = isinstance(actual, types.MemberDescriptorType)
            if each[0] != "_" and each not in known and not is_slot:
                yield f"its attribute {each}"

    def _of_methods(self, value: type, statement: ast.ClassDef) -> Iterator[str]:
        for each in statement.body:
            if not isinstance(each, ast.FunctionDef) or each.decorator_list:
                continue
            actual = vars(value).get(each.name)
            if not isinstance(actual, types.FunctionType):
                continue
            if not actual.__qualname__.endswith(f"{value.__name__}.{each.name}"):
                yield f"its method {each.name}"
            elif actual.__code__.co_filename != "<string>":
                yield from (
                    f"{part} of {each.name}" for part in self.of_function(actual, each.args)
                )

    def _is_same(self, actual: Any, node: ast.expr) -> bool:
        """Return whether an expression has the value now, where that is known without its evaluation."""
        try:
            expected = ast.literal_eval(node)
        except (ValueError, TypeError):
            expected = self._names.get(node.id, actual) if isinstance(node, ast.Name) else actual
        if expected is actual or expected is UNREAD:
            return True
        written = self._write(actual)
        return written is not None and written == self._write(expected)


def _assigned(statement: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the attributes that a class assigns once, without those that Python renames."""
    found = dict[str, ast.expr]()
    for each in statement.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        value = each.value if isinstance(each, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if not isinstance(target, ast.Name):
                continue
            found.pop(target.id, None)
            if value is not None and not target.id.startswith("__"):
                found[target.id] = value
    return found


def bare_names(statement: ast.stmt) -> frozenset[str]:
    """Return names that a definition uses only as a default or attribute, whose values are compared."""
    nodes = list[ast.expr]()
    function = _definition_of(statement)
    if function is not None:
        nodes += [*function.defaults, *(each for each in function.kw_defaults if each is not None)]
    if isinstance(statement, ast.ClassDef):
        nodes += _assigned(statement).values()
    return frozenset(each.id for each in nodes if isinstance(each, ast.Name))
