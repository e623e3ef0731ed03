"""The kinds of value that a job file holds, and the strict base of its sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from cloudtrain.errors import SpecError
from cloudtrain.job.document import Place
from cloudtrain.job.problems import (
    COLLECTING,
    Finding,
    explain,
    fail,
    fail_with,
)
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import (
    Cadence,
    parse_cadence,
    parse_duration,
    parse_money,
    parse_size,
)

DURATION_PATTERN = r"^(\d{1,9}(\.\d+)?\s*[smhd]\s*)+$"
SIZE_PATTERN = r"^\d{1,9}(\.\d+)?\s*([KMGT]i?B|B)$"
MONEY_PATTERN = r"^(\d{1,9}(\.\d+)?\s*USD|USD\s*\d{1,9}(\.\d+)?)$"
STEPS_PATTERN = r"^\d{1,9}\s*steps?$"

BUCKET_PATTERN = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"

_S3_URI = re.compile(rf"s3://{BUCKET_PATTERN}(?:/.*)?")
_S3_EXPECTED = "expected s3://bucket/prefix, with a bucket name of 3 to 63 small letters, digits, dots or hyphens"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_YES_NO = {"yes": True, "on": True, "no": False, "off": False}


def unit(parse: Callable[[object], Any]) -> BeforeValidator:
    """Return a validator that reads a human value such as `10m`."""

    def validate(value: object) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            raise fail(message, hint=hint) from None

    return BeforeValidator(validate)


def _written(form: str) -> PlainSerializer:
    """Return a serializer to JSON that writes a value with its unit, as it can be read again."""
    return PlainSerializer(form.format, return_type=str, when_used="json")


def matching(pattern: re.Pattern[str], expected: str, hint: str) -> BeforeValidator:
    """Return a validator that refuses text of another form; `expected` says which form in words."""

    def validate(value: object) -> object:
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise fail(f'expected {expected}, got "{value}"', hint=hint)
        return value

    return BeforeValidator(validate)


def _text(value: object) -> object:
    """Accept numbers and booleans where text is meant, as environments and tags need, spelled as they were written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(getattr(value, "text", value)) if isinstance(value, int | float) else value


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise fail(f"expected a number, got {str(value).lower()}", hint="write digits, such as 2")
    return value


def switch(value: object) -> object:
    """Return true and false for `yes`, `on`, `no` and `off`, which YAML 1.2 reads as text."""
    return _YES_NO.get(value.lower(), value) if isinstance(value, str) else value


def s3_problem(uri: str) -> str:
    """Return what is wrong with a uri that should lie in S3 or on this machine, or an empty string."""
    if ".." in uri.removeprefix("s3://").partition("/")[0] and uri.startswith("s3://"):
        return f'{_S3_EXPECTED}, got "{uri}"'
    scheme = _SCHEME.match(uri)
    if scheme is None or scheme[1] == "file":
        return ""
    return "" if _S3_URI.fullmatch(uri) else f'{_S3_EXPECTED}, got "{uri}"'


Duration = Annotated[
    int,
    unit(parse_duration),
    _written("{}s"),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["36h"]}),
]
"""Seconds, written `10m`, `36h`, `1h30m`."""
GigaBytes = Annotated[
    int,
    unit(lambda value: -(-parse_size(value) // 10**9)),
    _written("{}GB"),
    WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["200GB"]}),
]
"""Whole gigabytes, written `200GB`."""
MegaBytes = Annotated[
    int,
    unit(lambda value: -(-parse_size(value) // 10**6)),
    _written("{}MB"),
    WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["25MB"]}),
]
"""Whole megabytes, written `25MB`."""
Dollars = Annotated[
    float,
    unit(parse_money),
    _written("{} USD"),
    WithJsonSchema({"type": "string", "pattern": MONEY_PATTERN, "examples": ["500 USD"]}),
]
"""US dollars, written `500 USD`."""
Every = Annotated[
    Cadence,
    unit(parse_cadence),
    PlainSerializer(lambda value: f"{value.steps} steps" if value.steps else f"{value.seconds}s", when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "anyOf": [{"pattern": DURATION_PATTERN}, {"pattern": STEPS_PATTERN}],
            "examples": ["10m", "500 steps"],
        }
    ),
]
"""A duration or a number of optimizer steps, written `10m` or `500 steps`."""
Whole = Annotated[int, BeforeValidator(_no_switch)]
"""A whole number; true and false are none."""
Real = Annotated[float, BeforeValidator(_no_switch), Field(allow_inf_nan=False)]
"""A finite number; true and false are none."""
Text = Annotated[str, BeforeValidator(_text), WithJsonSchema({"type": ["string", "number", "boolean"]})]
"""Text; numbers and booleans are taken as they are written."""


class Section(BaseModel):
    """Strict base of every section: unknown fields are errors, instances are frozen.

    What a single value may be stands at its field. What several values may be together stands in `_rules`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, defer_build=True)

    if not TYPE_CHECKING:

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise SpecError(explain(type(self), error, _constructor_places(type(self)))) from None

        # Says to pydantic that nested sections need not go through this constructor (as its own RootModel does).
        __init__.__pydantic_base_init__ = True

    def _rules(self) -> Iterator[Finding]:
        """Yield what is wrong between this section's values; paths start here."""
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Self:
        # A reader of job files asks for the rules itself, so that one broken section does not hide another's problems.
        if info.context is not COLLECTING:
            findings = list(self._rules())
            if findings:
                raise fail_with(findings)
        return self


def broken_rules(section: Section, path: FieldPath = ()) -> Iterator[Finding]:
    """Yield what is wrong in a section and in every section below it; paths start at the outermost."""
    for finding in section._rules():  # noqa: SLF001 (every section is one of ours)
        yield finding.below(path)
    for name in type(section).model_fields:
        value = getattr(section, name)
        below = value.items() if isinstance(value, dict) else [(None, value)]
        for key, part in below:
            if isinstance(part, Section):
                yield from broken_rules(part, (*path, name) if key is None else (*path, name, key))


def _constructor_places(model: type[BaseModel]) -> Callable[[FieldPath, bool], Place]:
    return lambda _path, _key: Place(f"{model.__name__}(...)")
