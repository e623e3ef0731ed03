"""The JSON writer of SDK and runtime: its output is valid JSON, without NaN and infinity.

Python's own writer emits tokens for them that other readers reject. `dump_json` writes null. Values that must survive
are encoded by `encode_floats` and decoded by `decode_floats`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_FLOAT = "__float__"
"""Key of an object that represents a number which is not finite."""


def dump_json(content: Any, **options: Any) -> str:
    """Return JSON text; numbers that are not finite become null. The arguments are those of `json.dumps`.

    Raises:
        TypeError: a value has no JSON form.
        ValueError: the content contains itself.
    """
    try:
        return json.dumps(content, allow_nan=False, **options)  # noqa: TID251 (this is the writer)
    except ValueError as error:
        if not str(error).startswith("Out of range float"):
            raise
    content = _replace_nonfinite(content, lambda _: None)
    return json.dumps(content, allow_nan=False, **options)  # noqa: TID251 (this is the writer)


def encode_floats(value: Any) -> Any:
    """Return a value in which an object with its name replaces each number that is not finite."""
    return _replace_nonfinite(value, lambda number: {_FLOAT: str(number)})


def decode_floats(value: Any) -> Any:
    """Reverse `encode_floats`; tuples become lists."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {name: decode_floats(part) for name, part in value.items()}
    return [decode_floats(part) for part in value] if isinstance(value, list) else value


def _replace_nonfinite(value: Any, replacement: Callable[[float], Any]) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else replacement(value)
    if isinstance(value, dict):
        return {name: _replace_nonfinite(part, replacement) for name, part in value.items()}
    return (
        [_replace_nonfinite(part, replacement) for part in value]
        if isinstance(value, list | tuple)
        else value
    )
