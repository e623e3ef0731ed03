"""Validators of untrusted JSON: event lines, and files that any program may have written.

A validator takes a value and returns the value to use, or raises `MismatchError`. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Validator = Callable[[Any], Any]

LARGEST_INTEGER: Final = 2**53
"""Larger integers are not exact in every JSON reader, and no count of ours is as large."""

_DEEPEST = 16
_TOO_LARGE = 2**63


class MismatchError(ValueError):
    """A value is not what its schema expects.

    Args:
        expected: What the schema expects, such as `text`.
        found: The value.
        path: Dotted path of the field, empty for the value itself.
    """

    def __init__(self, expected: str, found: Any, path: str = "") -> None:
        self.expected = expected
        self.found = found
        self.path = path
        place = f"{path}: " if path else ""
        super().__init__(f"{place}expected {expected}, found {_describe(found)}")

    def below(self, name: str) -> MismatchError:
        """Return the same error, seen from the object that holds the value in a field."""
        path = f"{name}.{self.path}" if self.path else name
        return MismatchError(self.expected, self.found, path)


def normalise(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that is safe to format, encode and compute with.

    Numbers that are not finite or larger than 64 bits become None, as does what is nested deeper than 16 levels. Lone
    surrogates in texts become question marks.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) < _TOO_LARGE else None
    if isinstance(value, dict) and depth < _DEEPEST:
        return {normalise(str(name)): normalise(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list) and depth < _DEEPEST:
        return [normalise(part, depth + 1) for part in value]
    return None


def text(value: Any) -> str:
    """Check a text."""
    return str(normalise(_typed(value, str, "text")))


def boolean(value: Any) -> bool:
    """Check true or false."""
    return bool(_typed(value, bool, "true or false"))


def number(value: Any) -> float:
    """Check a finite number."""
    # By the exact type, because true and false are integers of Python, too.
    kind = type(value)
    if kind is float and math.isfinite(value):
        return float(value)
    if kind is int and abs(value) < _TOO_LARGE:
        return int(value)
    raise MismatchError("a number", value)


def measurement(value: Any) -> float | None:
    """Check a measured number, or null for one that is not finite."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is int:
        return value if abs(value) < _TOO_LARGE else None
    if value is None:
        return None
    raise MismatchError("a number", value)


def integer(value: Any) -> int:
    """Check an integer of either sign."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_INTEGER:
        raise MismatchError("an integer", value)
    return value


def count(value: Any) -> int:
    """Check an integer that is not negative."""
    if integer(value) < 0:
        raise MismatchError("an integer that is not negative", value)
    return int(value)


def timestamp(value: Any) -> float:
    """Check a time in seconds since the epoch, up to the year 9999."""
    if not 0 <= number(value) < 253_402_300_800:  # noqa: PLR2004 (1 January of the year 10000)
        raise MismatchError("seconds since 1970", value)
    return float(value)


def nullable(check: Validator) -> Validator:
    """Return a check that also accepts null."""
    return lambda value: None if value is None else check(value)


def array(check: Validator) -> Validator:
    """Return a check of a list whose items all pass a check."""
    return lambda value: [
        _apply(check, each, str(at)) for at, each in enumerate(_typed(value, list, "a list"))
    ]


def mapping(check: Validator) -> Validator:
    """Return a check of an object that keeps the fields which pass a check."""
    return lambda value: _keep(json_object(value), {}, check)


def json_object(value: Any) -> dict[str, Any]:
    """Check an object, whatever its fields are."""
    return _typed(value, dict, "an object")  # type: ignore[no-any-return]


def _typed(value: Any, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise MismatchError(expected, value)
    return value


@dataclass(frozen=True)
class ObjectSchema:
    """The fields of an object."""

    # validators of the required fields
    required: Mapping[str, Validator] = dataclasses.field(default_factory=dict)
    # validators of other fields. A field of a wrong type is omitted from the result.
    optional: Mapping[str, Validator] = dataclasses.field(default_factory=dict)
    # validator of fields that the schema does not name; None keeps them, normalized
    others: Validator | None = None

    def __call__(self, value: Any) -> dict[str, Any]:
        """Return the object with the fields that pass their checks."""
        fields = json_object(value)
        needed = {
            name: _apply(check, fields.get(name), name) for name, check in self.required.items()
        }
        return {**_keep(fields, self.optional, self.others), **needed}


def _keep(
    value: dict[str, Any], checks: Mapping[str, Validator], others: Validator | None
) -> dict[str, Any]:
    found = {}
    for name, part in value.items():
        check = checks.get(name, others)
        key = name if name.isascii() else normalise(name)
        try:
            found[key] = normalise(part) if check is None else check(part)
        except MismatchError:
            continue
    return found


def _apply(check: Validator, value: Any, name: str) -> Any:
    try:
        return check(value)
    except MismatchError as error:
        raise error.below(name) from None


def _describe(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else f"{value!r:.40}"
