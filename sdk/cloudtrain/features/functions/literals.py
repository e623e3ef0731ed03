"""Values that travel as Python source: what a name of a notebook has now, written as an expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cloudtrain.features.functions.instances import write_instance
from cloudtrain.features.functions.standard_values import STANDARD
from cloudtrain.features.functions.value_writer import NoExpressionError, Writer

_MOST_CHARACTERS: Final = 100_000
"""Larger constants are data, which belong into a file."""


@dataclass(frozen=True)
class Expression:
    """Python source of a value.

    Attributes:
        text: The expression.
        imports: Statements that it needs.
        names: Names of the notebook that it needs: classes and functions of its own.
        modules: Modules that it imports, by their full names.
    """

    text: str
    imports: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()


def write_value(
    value: Any,
    names: Mapping[str, Any] | None = None,
    *,
    is_local: Callable[[str], bool] = lambda _: False,
) -> Expression | None:
    """Return a value as an expression, or None if it has none.

    It has one if its state has: literals, containers, standard types, members of enumerations, instances of the
    notebook's own classes and of those of local modules, and functions and classes that have a name.

    Args:
        value: The value.
        names: Names of the notebook.
        is_local: Whether a module lies outside of installed packages.
    """
    writer = Writer(names or {}, is_local, _write_other)
    try:
        text = writer.write(value)
    except NoExpressionError:
        return None
    if len(text) > _MOST_CHARACTERS:
        return None
    return Expression(
        text, frozenset(writer.imports), frozenset(writer.used), frozenset(writer.modules)
    )


def _write_other(value: Any, writer: Writer) -> str:
    kind = type(value)
    return STANDARD[kind](value, writer) if kind in STANDARD else write_instance(value, writer)
