"""The JSON writer and reader of SDK and runtime.

The writer's output is valid JSON, without NaN and infinity. Python's own writer emits tokens for them that other
readers reject. `dump_json` writes null. Values that must survive are encoded by `encode_floats` and decoded by
`decode_floats`.

The reader has one error for all that is wrong with a text. Python's own raises another one for a text that is nested
deeply, and where it accepts one, what walks through the content fails later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_DEEPEST = 200
_TOO_DEEP = f"it is nested deeper than {_DEEPEST} levels"
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


def load_json(text: str | bytes, **options: Any) -> Any:
    """Return the content of a JSON text, whoever wrote it. The arguments are those of `json.loads`.

    Raises:
        ValueError: it is not JSON, or nested deeper than 200 levels.
    """
    try:
        content = json.loads(text, **options)  # noqa: TID251 (this is the reader)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(text, content)
    return content


def check_depth(text: str | bytes, content: Any) -> None:
    """Check that the content of a JSON text is not nested deeply.

    Raises:
        ValueError: it is nested deeper than 200 levels.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    # Almost all texts have so few brackets.
    if raw.count(b"[") + raw.count(b"{") <= _DEEPEST:
        return
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(_DEEPEST + 1):
        parts = (value.values() if isinstance(value, dict) else value for value in level)
        level = [part for several in parts for part in several if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def encode_floats(value: Any) -> Any:
    """Return a value in which an object with its name replaces each number that is not finite."""
    return _replace_nonfinite(value, lambda number: {_FLOAT: str(number)})


def decode_floats(value: Any) -> Any:
    """Reverse `encode_floats`; tuples become lists."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {name: decode_floats(part) for name, part in value.items()}
    if isinstance(value, list):
        return [decode_floats(part) for part in value]
    return value


def _replace_nonfinite(value: Any, replacement: Callable[[float], Any]) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else replacement(value)
    if isinstance(value, dict):
        return {name: _replace_nonfinite(part, replacement) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(part, replacement) for part in value]
    return value
