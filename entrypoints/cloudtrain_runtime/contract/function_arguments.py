"""Arguments of a function as words of a command line, which keep their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloudtrain_runtime.contract.returned_values import (
    ReturnedValueError,
    decode_plain,
    encode_plain,
)
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def parse_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Return keyword arguments of `--name value` pairs. A value is JSON, or else text; without a value it is true.

    Tuples, sets and keys that are no text have the form that a returned value has, such as `{"$tuple": [1, 2]}`.
    """
    found = dict[str, Any]()
    words = list(argv)
    while words:
        name = words.pop(0).removeprefix("--")
        if not words or words[0].startswith("--"):
            found[name] = True
        else:
            found[name] = _parse_value(words.pop(0))
    return found


def _parse_value(text: str) -> Any:
    for parse in (load_json, float):
        try:
            return decode_plain(parse(text))
        except (ValueError, TypeError, AttributeError):
            continue
    return text


def spell_argument(value: Any) -> Any:
    """Return a value of `code.args` from which `parse_arguments` makes this value again.

    Raises:
        TypeError: It has no such form.
    """
    if value is True or type(value) in (int, float):
        return value
    if (
        isinstance(value, str)
        and value
        and not value.startswith("--")
        and _parse_value(value) == value
    ):
        return value
    try:
        return dump_json(encode_plain(value))
    except ReturnedValueError as error:
        raise TypeError(str(error)) from None
