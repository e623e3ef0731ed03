"""Field types of job.yaml, and the strict base class of its sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema

from cloudtrain.errors import SpecError
from cloudtrain.job.diagnostics import (
    DEFER_CROSS_FIELD_CHECKS,
    Diagnostic,
    diagnostics_of,
    field_error,
    field_errors,
    to_problem,
    type_arguments,
)
from cloudtrain.job.document import SourceLocation
from cloudtrain.support.aws_names import BUCKET_PATTERN
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import (
    Cadence,
    parse_cadence,
    parse_duration,
    parse_money,
    parse_size,
)
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

DURATION_PATTERN = r"^(\d{1,9}(\.\d+)?\s*[smhd]\s*)+$"
SIZE_PATTERN = r"^\d{1,9}(\.\d+)?\s*([KMGT]i?B|B)$"
MONEY_PATTERN = r"^(\d{1,9}(\.\d+)?\s*USD|USD\s*\d{1,9}(\.\d+)?)$"
STEPS_PATTERN = r"^\d{1,9}\s*steps?$"

_S3_URI = lazy_pattern(rf"s3://{BUCKET_PATTERN}(?:/.*)?")
_S3_EXPECTED = "expected s3://bucket/prefix, with a bucket name of 3 to 63 lowercase letters, digits, dots or hyphens"
_SCHEME = lazy_pattern(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}


def parsed_by(parse: Callable[[object], Any]) -> BeforeValidator:
    """Return a validator that parses a value with a unit, such as `10m`.

    Args:
        parse: Raises ValueError; in its message a hint may follow after a semicolon.
    """

    def validate(value: object) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            raise field_error(message, hint=hint) from None

    return BeforeValidator(validate)


def _serialized_as(template: str) -> PlainSerializer:
    """Return a serializer to JSON that writes a value with its unit, so that it can be parsed again."""

    # Not `template.format` itself: pydantic counts the parameters of a serializer by its signature, and that of
    # `str.format` changed in Python 3.13.
    def serialize(value: object) -> str:
        return template.format(value)

    return PlainSerializer(serialize, return_type=str, when_used="json")


def matching(pattern: re.Pattern[str], expected: str, hint: str) -> BeforeValidator:
    """Return a validator that rejects text that does not match a pattern.

    Args:
        pattern: Must match all of the text.
        expected: The pattern in words.
        hint: What to do about other text.
    """

    def validate(value: object) -> object:
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise field_error(f'expected {expected}, got "{value}"', hint=hint)
        return value

    return BeforeValidator(validate)


def _number_as_text(value: object) -> object:
    """Return numbers and booleans as the text in the job file, for fields such as environment variables and tags."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(getattr(value, "text", value))
    return value


def _reject_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise field_error(
            f"expected a number, got {str(value).lower()}", hint="write digits, such as 2"
        )
    return value


def parse_switch(value: object) -> object:
    """Return a boolean for `yes`, `on`, `no` and `off`, which are text in YAML 1.2; other values as they are."""
    if not isinstance(value, str):
        return value
    return _SWITCHES.get(value.lower(), value)


def short_for(field: str) -> BeforeValidator:
    """Return a validator of a section that takes text alone as the value of one of its fields."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)


def s3_uri_error(uri: str) -> str:
    """Return what is wrong with an S3 uri; an empty string for a valid one and for a local path."""
    bucket = uri.removeprefix("s3://").partition("/")[0]
    if uri.startswith("s3://") and ".." in bucket:
        return f'{_S3_EXPECTED}, got "{uri}"'
    scheme = _SCHEME.match(uri)
    if scheme is None or scheme[1] == "file":
        return ""
    if "$" in bucket:
        return (
            f'variables are not expanded in a job file, got "{uri}": write the value, or let your shell do it: '
            '--set FIELD="s3://$BUCKET/..."'
        )
    return "" if _S3_URI.fullmatch(uri) else f'{_S3_EXPECTED}, got "{uri}"'


class _IsInstance:
    """Lets pydantic check the type of a parsed value; it would validate each field of a data class."""

    def __get_pydantic_core_schema__(self, source: type, _: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(source)


Duration = Annotated[
    int,
    parsed_by(parse_duration),
    _serialized_as("{}s"),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["36h"]}),
]
"""Seconds, written `10m`, `36h`, `1h30m`."""
GigaBytes = Annotated[
    int,
    parsed_by(lambda value: -(-parse_size(value) // 10**9)),
    _serialized_as("{}GB"),
    WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["200GB"]}),
]
"""Gigabytes, rounded up, written `200GB`."""
MegaBytes = Annotated[
    int,
    parsed_by(lambda value: -(-parse_size(value) // 10**6)),
    _serialized_as("{}MB"),
    WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["25MB"]}),
]
"""Megabytes, rounded up, written `25MB`."""
Dollars = Annotated[
    float,
    parsed_by(parse_money),
    _serialized_as("{} USD"),
    WithJsonSchema({"type": "string", "pattern": MONEY_PATTERN, "examples": ["500 USD"]}),
]
"""US dollars, written `500 USD`."""
Every = Annotated[
    Cadence,
    _IsInstance(),
    parsed_by(parse_cadence),
    PlainSerializer(
        lambda value: f"{value.steps} steps" if value.steps else f"{value.seconds}s",
        when_used="json",
    ),
    WithJsonSchema(
        {
            "type": "string",
            "anyOf": [{"pattern": DURATION_PATTERN}, {"pattern": STEPS_PATTERN}],
            "examples": ["10m", "500 steps"],
        }
    ),
]
"""A duration or a number of optimizer steps, written `10m` or `500 steps`."""
Integer = Annotated[int, BeforeValidator(_reject_boolean)]
"""An integer; true and false are rejected."""
FiniteFloat = Annotated[float, BeforeValidator(_reject_boolean), Field(allow_inf_nan=False)]
"""A finite number; true and false are rejected."""
Text = Annotated[
    str, BeforeValidator(_number_as_text), WithJsonSchema({"type": ["string", "number", "boolean"]})
]
"""Text; numbers and booleans are accepted as the text in the job file."""


class Section(BaseModel):
    """Strict base class of every section: unknown fields are errors, and instances are frozen.

    Types and validators of fields check single values; `_cross_field_errors` checks several values together.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, defer_build=True
    )

    if not TYPE_CHECKING:

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                constructor = SourceLocation(f"{type(self).__name__}(...)")
                problems = [
                    to_problem(each, constructor) for each in diagnostics_of(type(self), error)
                ]
                raise SpecError(problems) from None

        # Lets pydantic construct nested sections without this constructor, as pydantic's own RootModel does.
        __init__.__pydantic_base_init__ = True

        def model_dump(self, **options: Any) -> dict[str, Any]:
            """Return the values of this section as pydantic does; Ctrl-C stays Ctrl-C."""
            try:
                return super().model_dump(**options)
            except PydanticSerializationError as error:
                # Pydantic wraps whatever one of our serializers raises.
                if error.__cause__ is None or isinstance(error.__cause__, Exception):
                    raise
                raise error.__cause__ from None

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        """Yield the errors between this section's values; paths begin at this section."""
        yield from ()

    @model_validator(mode="after")
    def _raise_cross_field_errors(self, info: ValidationInfo) -> Self:
        # The loader of job files calls `cross_field_errors` itself: raised here, an error in one section would hide
        # those of the others.
        if info.context is not DEFER_CROSS_FIELD_CHECKS:
            errors = list(self._cross_field_errors())
            if errors:
                raise field_errors(errors)
        return self

    def cross_field_errors(self, path: FieldPath = ()) -> Iterator[Diagnostic]:
        """Yield the errors between the values of this section and of every section below it.

        Args:
            path: Put before every path.
        """
        for diagnostic in self._cross_field_errors():
            yield diagnostic.below(path)
        for name in type(self).model_fields:
            value = getattr(self, name)
            below = value.items() if isinstance(value, dict) else [(None, value)]
            for key, part in below:
                if isinstance(part, Section):
                    yield from part.cross_field_errors(
                        (*path, name) if key is None else (*path, name, key)
                    )


def sections_of(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield a section and every section below it, each with its dotted path; `<name>` is any key of a mapping."""
    yield path, section
    for name, field in section.model_fields.items():
        is_mapping = getattr(field.annotation, "__origin__", None) is dict
        part = f"{name}.<name>" if is_mapping else name
        for kind in type_arguments(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from sections_of(kind, f"{path}.{part}" if path else part)
