"""Expressions of values of Python's own types that are no literals."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import functools
import logging
import re
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from cloudtrain.features.functions.value_writer import NoExpressionError

if TYPE_CHECKING:
    from cloudtrain.features.functions.value_writer import Writer


def _namespace(value: Any, writer: Writer) -> str:
    kind = type(value)
    state = ", ".join(f"{key}: {part}" for key, part in writer.pairs(vars(value)))
    return f"{writer.module(kind.__module__)}.{kind.__name__}(**{{{state}}})"


def _mapping(value: Any, writer: Writer) -> str:
    content = ", ".join(f"({key}, {part})" for key, part in writer.pairs(value))
    first = ""
    if isinstance(value, collections.defaultdict):
        first = f"{writer.write(value.default_factory)}, "
    pairs = f"dict([{content}])" if isinstance(value, collections.Counter) else f"[{content}]"
    return f"{writer.module('collections')}.{type(value).__name__}({first}{pairs})"


def _deque(value: Any, writer: Writer) -> str:
    return f"{writer.module('collections')}.deque({writer.write(list(value))}, {value.maxlen!r})"


def _slice(value: Any, writer: Writer) -> str:
    parts = [writer.write(each) for each in (value.start, value.stop, value.step)]
    return f"slice({', '.join(parts)})"


def _complex(value: Any, writer: Writer) -> str:
    return f"complex({writer.write(value.real)}, {writer.write(value.imag)})"


def _repr(value: Any, writer: Writer) -> str:
    """Write a value whose `repr` is its constructor's call."""
    kind = type(value)
    text = repr(value)
    if kind.__module__ == "builtins":
        return text
    return f"{writer.module(kind.__module__)}.{text.removeprefix(f'{kind.__module__}.')}"


def _time(value: Any, writer: Writer) -> str:
    zone = getattr(value, "tzinfo", None)
    if zone is not None and type(zone) is not dt.timezone:
        raise NoExpressionError
    module = writer.module("datetime")
    return repr(value).replace("datetime.", f"{module}.")


def _pattern(value: Any, writer: Writer) -> str:
    return f"{writer.module('re')}.compile({value.pattern!r}, {value.flags})"


def _partial(value: Any, writer: Writer) -> str:
    if vars(value):
        raise NoExpressionError
    parts = [writer.write(value.func), *(writer.write(each) for each in value.args)]
    parts += [f"{key}={writer.write(part)}" for key, part in value.keywords.items()]
    return f"{writer.module('functools')}.partial({', '.join(parts)})"


def _logger(value: Any, writer: Writer) -> str:
    """Write a logger by its name. What was configured is the process's."""
    return f"{writer.module('logging')}.getLogger({value.name!r})"


STANDARD: Final[Mapping[type, Callable[[Any, Writer], str]]] = {
    types.SimpleNamespace: _namespace,
    argparse.Namespace: _namespace,
    collections.Counter: _mapping,
    collections.OrderedDict: _mapping,
    collections.defaultdict: _mapping,
    collections.deque: _deque,
    range: _repr,
    bytearray: _repr,
    slice: _slice,
    complex: _complex,
    decimal.Decimal: _repr,
    fractions.Fraction: _repr,
    re.Pattern: _pattern,
    functools.partial: _partial,
    logging.Logger: _logger,
    **dict.fromkeys(
        (
            dt.datetime,
            dt.date,
            dt.time,
            dt.timedelta,
            dt.timezone,
        ),
        _time,
    ),
}
"""How values of a type are written."""
