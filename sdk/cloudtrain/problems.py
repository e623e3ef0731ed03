"""Pydantic's errors in our words: where, what was expected, the nearest legal value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from cloudtrain.document import FieldPath, Place, dotted
from cloudtrain.errors import Problem, did_you_mean, nearest


def fail(message: str, *, at: FieldPath = (), hint: str = "") -> PydanticCustomError:
    """Return an error that a validator raises; `at` is the field's path below the model."""
    # Templates go through str.format, hence the context instead of an f-string.
    return PydanticCustomError("cloudtrain", "{message}", {"message": message, "at": at, "hint": hint})


def explain(
    model: type[BaseModel], error: ValidationError, place_of: Callable[[FieldPath, bool], Place]
) -> list[Problem]:
    """Return the problems that a validation error tells, each with its place.

    Args:
        model: What was validated.
        error: Pydantic's error.
        place_of: Returns the place of a path's value, or with True of its key.
    """
    problems: dict[tuple[FieldPath, str], Problem] = {}
    for details in error.errors(include_url=False):
        path, message, hint = _explain(model, details)
        place = place_of(path, details["type"] == "extra_forbidden")
        problem = Problem(place.file, place.line, place.column, dotted(path), message, hint)
        problems.setdefault((path, message), problem)
    # A value that fits no member of a union is told once, by the member that says most.
    told = {path for path, message in problems if not message.startswith("expected one of")}
    return [
        problem
        for (path, message), problem in problems.items()
        if path not in told or not message.startswith("expected one of")
    ]


def _explain(  # noqa: PLR0911 (one return per kind of error)
    model: type[BaseModel], details: ErrorDetails
) -> tuple[FieldPath, str, str]:
    """Return path, message and hint of one of pydantic's errors."""
    path = _field_path(model, details["loc"])
    context: Mapping[str, Any] = details.get("ctx", {})
    kind = details["type"]
    given = details["input"]
    if kind == "cloudtrain":
        return (*path, *context["at"]), str(context["message"]), str(context["hint"])
    if kind == "extra_forbidden":
        legal = sorted(_fields_at(model, path[:-1]))
        return path, "unknown field", did_you_mean(str(path[-1]), legal)
    if kind == "missing":
        return path, "required field is missing", ""
    if kind == "literal_error":
        legal = [str(value) for value in _literals(model, path)] or [str(context.get("expected", ""))]
        near = nearest(str(given), legal)
        hint = f'did you mean "{near}"?' if near else ""
        return path, f'expected one of {", ".join(legal)}, got "{given}"', hint
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return path, f"expected a mapping of fields, got {_show(given)}", ""
    for prefix, expected in _EXPECTED.items():
        if kind.startswith(prefix):
            return path, f"expected {expected}, got {_show(given)}", ""
    message = details["msg"].replace("Input should", "must").replace("Value error, ", "")
    return path, f"{message}, got {_show(given)}", ""


_EXPECTED = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "text",
    "tuple_": "a list",
    "list_": "a list",
}


def _show(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 (fits a terminal's line)


def _field_path(model: type[BaseModel], loc: tuple[str | int, ...]) -> FieldPath:
    """Drop the parts of pydantic's location that name union members instead of fields."""
    path: FieldPath = ()
    current: type[BaseModel] | None = model
    for part in loc:
        if current is not None and isinstance(part, str) and part not in current.model_fields and part != loc[-1]:
            break
        if isinstance(part, str) and current is None and path and path[0] != "data" and _is_union_tag(part):
            break
        path = (*path, part)
        current = _model_at(model, path)
    return path


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
