"""Pydantic's errors in our words: where, what was expected, the nearest legal value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from cloudtrain.errors import Problem, did_you_mean, nearest
from cloudtrain.job.document import Place, dotted
from cloudtrain.support.field_path import FieldPath

COLLECTING = object()
"""Validation context of a reader that asks for the rules between values itself, after it has read every value."""


@dataclass(frozen=True)
class Finding:
    """One mistake, before it is known where its value was written.

    Attributes:
        message: What is wrong and what was expected.
        at: Path of the field.
        hint: The nearest legal value or what to do.
        about: Every field that was compared, where `at` is not the only one. A finding about a value that is wrong
            itself says nothing.
        is_key: Whether the field's name is to blame, not its value.
        place: Where it stands, if that is a file of the code.
    """

    message: str
    at: FieldPath = ()
    hint: str = ""
    about: tuple[FieldPath, ...] = ()
    is_key: bool = False
    place: Place | None = None

    def below(self, path: FieldPath) -> Finding:
        """Return the finding with paths that start further out."""
        return replace(self, at=(*path, *self.at), about=tuple((*path, *other) for other in self.about))

    def concerns(self, paths: Iterable[FieldPath]) -> bool:
        """Return whether one of the compared fields is, holds, or lies in one of these."""
        return any(
            field[: len(path)] == path or path[: len(field)] == field
            for field in (self.about or (self.at,))
            for path in paths
        )


def fail(message: str, *, at: FieldPath = (), hint: str = "") -> PydanticCustomError:
    """Return an error that a validator raises; `at` is the field's path below the model."""
    return fail_with([Finding(message, at, hint)])


def fail_with(findings: Iterable[Finding]) -> PydanticCustomError:
    """Return an error that tells several findings."""
    every = tuple(findings)
    # Who calls pydantic directly reads the message; our reader takes the findings.
    told = "; ".join(finding.message for finding in every)
    return PydanticCustomError("cloudtrain", "{told}", {"findings": every, "told": told})


def explain(
    model: type[BaseModel], error: ValidationError, place_of: Callable[[FieldPath, bool], Place]
) -> list[Problem]:
    """Return the problems that a validation error tells, each with its place.

    Args:
        model: What was validated.
        error: Pydantic's error.
        place_of: Returns the place of a path's value, or with True of its key.
    """
    return [place_finding(finding, place_of) for finding in findings_of(model, error)]


def place_finding(finding: Finding, place_of: Callable[[FieldPath, bool], Place]) -> Problem:
    """Return the problem that a finding is, at the place of its value or key, or in the file of the code."""
    if finding.place is not None:
        return Problem(finding.place.file, finding.place.line, finding.place.column, "", finding.message, finding.hint)
    place = place_of(finding.at, finding.is_key)
    return Problem(place.file, place.line, place.column, dotted(finding.at), finding.message, finding.hint)


def findings_of(model: type[BaseModel], error: ValidationError) -> list[Finding]:
    """Return what a validation error tells."""
    found: dict[tuple[FieldPath, str], Finding] = {}
    for details in error.errors(include_url=False):
        for finding in _findings(model, details):
            found.setdefault((finding.at, finding.message), finding)
    # A value that fits no member of a union is told once, by the member that says most.
    told = {finding.at for finding in found.values() if not finding.message.startswith("expected one of")}
    return [
        finding
        for finding in found.values()
        if finding.at not in told or not finding.message.startswith("expected one of")
    ]


def _findings(model: type[BaseModel], details: ErrorDetails) -> list[Finding]:
    if details["type"] == "cloudtrain":
        path = _field_path(model, details["loc"])
        return [finding.below(path) for finding in details["ctx"]["findings"]]
    path, message, hint = _explain(model, details)
    return [Finding(message, path, hint, is_key=details["type"] == "extra_forbidden")]


def _explain(  # noqa: PLR0911 (one return per kind of error)
    model: type[BaseModel], details: ErrorDetails
) -> tuple[FieldPath, str, str]:
    """Return path, message and hint of one of pydantic's errors."""
    path = _field_path(model, details["loc"])
    context: Mapping[str, Any] = details.get("ctx", {})
    kind = details["type"]
    given = details["input"]
    if kind == "extra_forbidden":
        legal = sorted(_fields_at(model, path[:-1]))
        return path, "unknown field", did_you_mean(str(path[-1]), legal)
    example = _example(model, path)
    if kind == "missing":
        return path, "required field is missing", example
    if kind == "literal_error":
        legal = [str(value) for value in _literals(model, path)] or [str(context.get("expected", ""))]
        near = nearest(str(given), legal)
        hint = f'did you mean "{near}"?' if near else f"use {legal[0]}"
        return path, f'expected one of {", ".join(legal)}, got "{given}"', hint
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return path, f"expected a mapping of fields, got {_show(given)}", example or "write key: value, indented below"
    for bound, (words, hint) in _BOUNDS.items():
        if bound in context:
            limit = context[bound]
            return path, f"expected {words} {limit:g}, got {_show(given)}", f"use {hint} {limit:g}"
    for prefix, (expected, hint) in _EXPECTED.items():
        if kind.startswith(prefix):
            return path, f"expected {expected}, got {_show(given)}", example or hint
    message = details["msg"].replace("Input should", "must").replace("Value error, ", "")
    return path, f"{message}, got {_show(given)}", example


_BOUNDS = {
    "ge": ("at least", "at least"),
    "gt": ("more than", "more than"),
    "le": ("at most", "at most"),
    "lt": ("less than", "less than"),
}
_EXPECTED = {
    "finite_number": ("a finite number", "write digits, such as 2"),
    "int_": ("a whole number", "write digits only, such as 2"),
    "float_": ("a number", "such as 0.1 or 3e-4"),
    "bool_": ("true or false", "write true or false"),
    "string_": ("text", "write it in one line, in quotes where it could be read as something else"),
    "tuple_": ("a list", "write it in brackets: [first, second]"),
    "list_": ("a list", "write it in brackets: [first, second]"),
}


def _example(model: type[BaseModel], path: FieldPath) -> str:
    """Return a hint that shows the field with a legal value, where the model gives one."""
    section = (_model_at(model, path[:-1]) if path[:-1] else model) if path else None
    field = section.model_fields.get(str(path[-1])) if section is not None else None
    if field is None or not field.examples:
        return ""
    return f"for example {path[-1]}: {_flow(field.examples[0])}"


def _flow(value: Any) -> str:
    """Return a value as YAML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) and ":" in value else str(value)


def _show(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 (fits a terminal's line)


def _field_path(model: type[BaseModel], loc: tuple[str | int, ...]) -> FieldPath:
    """Drop the parts of pydantic's location that name union members instead of fields."""
    path: FieldPath = ()
    current: type[BaseModel] | None = model
    for part in loc:
        if part in _TAGS and path[:2] == ("code", "env") and len(path) == len(_VARIABLE):
            continue
        if current is not None and isinstance(part, str) and part not in current.model_fields and part != loc[-1]:
            break
        if isinstance(part, str) and current is None and path and path[0] != "data" and _is_union_tag(part):
            break
        path = (*path, part)
        current = _model_at(model, path)
    return path


_VARIABLE = ("code", "env", "NAME")
_TAGS = ("Secret", "text")
"""How pydantic's location tells which kind of variable it has read."""


def _is_union_tag(part: str) -> bool:
    return "[" in part or part in ("int", "str", "bool", "float", "constrained-int", "constrained-float", "dict")


def _model_at(model: type[BaseModel], path: FieldPath) -> type[BaseModel] | None:
    """Return the section that lies at a path, or None when a plain value lies there."""
    current: Any = model
    for part in path:
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            inner = [kind for kind in _flatten(current) if isinstance(kind, type) and issubclass(kind, BaseModel)]
            current = inner[0] if inner else None
            continue
        field = current.model_fields.get(str(part))
        if field is None:
            return None
        models = [kind for kind in _flatten(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        is_mapping = getattr(field.annotation, "__origin__", None) is dict
        current = field.annotation if is_mapping else (models[0] if models else None)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _flatten(annotation: Any) -> list[Any]:
    """Return an annotation and everything in its type arguments."""
    found = [annotation]
    for argument in get_args(annotation):
        found += _flatten(argument)
    return found


def _fields_at(model: type[BaseModel], path: FieldPath) -> list[str]:
    section = _model_at(model, path) if path else model
    return list(section.model_fields) if section is not None else []


def _literals(model: type[BaseModel], path: FieldPath) -> list[object]:
    section = _model_at(model, path[:-1]) if path[:-1] else model
    field = section.model_fields.get(str(path[-1])) if section is not None else None
    if field is None:
        return []
    return [
        value for kind in _flatten(field.annotation) if not get_args(kind) for value in [kind] if isinstance(kind, str)
    ]
