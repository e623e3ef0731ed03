"""Expressions of instances of the notebook's own classes and of those of local modules."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
from typing import TYPE_CHECKING, Any, Final

from cloudtrain.features.functions.value_writer import NoExpressionError

if TYPE_CHECKING:
    from cloudtrain.features.functions.value_writer import Writer

_OWN_FORM: Final = ("__reduce__", "__reduce_ex__", "__getstate__")
"""Methods with which a class says itself what its state is."""


def write_instance(value: Any, writer: Writer) -> str:
    """Return the expression of an instance: its class, and its state by value. No constructor is called again.

    Args:
        value: The instance.
        writer: Writes its parts.

    Raises:
        NoExpressionError: The class is of a library, or the state has no expression.
    """
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _member(value, writer)
    if kind.__module__ != "__main__" and not writer.is_local(kind.__module__):
        raise NoExpressionError
    name = writer.named(kind)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return f"{name}({', '.join(writer.write(each) for each in value)})"
    state = _state(value)
    if _is_plain(value, state):
        parts = [f"{key}={writer.write(part)}" for key, part in state.items()]
        return f"{name}({', '.join(parts)})"
    module = writer.module("cloudtrain_runtime.process.function_call")
    return f"{module}.with_state({name}, {writer.write(state)})"


def _member(value: enum.Enum, writer: Writer) -> str:
    name = writer.named(type(value))
    members = type(value).__members__
    if members.get(str(value.name)) is value:
        return f"{name}[{value.name!r}]"
    return f"{name}({writer.write(value.value)})"


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance."""
    kind = type(value)
    if any(getattr(kind, each) is not getattr(object, each) for each in _OWN_FORM):
        if not (dataclasses.is_dataclass(kind) and hasattr(kind, "__slots__")):
            raise NoExpressionError
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    try:
        reduced: Any = object.__reduce_ex__(value, 4)
    except TypeError:
        # It has a state that Python does not know.
        raise NoExpressionError from None
    made, args, state, *parts = reduced
    if (
        made is not getattr(copyreg, "__newobj__", None)
        or args != (kind,)
        or any(each is not None for each in parts)
    ):
        raise NoExpressionError
    inside, slots = state if isinstance(state, tuple) else (state, None)
    return {**(inside or {}), **(slots or {})}


def _is_plain(value: Any, state: dict[str, Any]) -> bool:
    """Return whether the generated constructor of a dataclass sets exactly this state."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__post_init__"):
        return False
    if kind.__init__.__code__.co_filename != "<string>" or kind.__new__ is not object.__new__:
        return False
    fields = dataclasses.fields(kind)
    return all(each.init for each in fields) and list(state) == [each.name for each in fields]
