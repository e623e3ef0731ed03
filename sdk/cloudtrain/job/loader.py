"""Validation of a job document that finds every error in one pass, and changes of its fields."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from cloudtrain.errors import Problem, UserError
from cloudtrain.job.diagnostics import DEFER_CROSS_FIELD_CHECKS, diagnostics_of, to_problem
from cloudtrain.job.document import Document, SourceLocation, parse_scalar
from cloudtrain.job.fields import Section, sections_of
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.one_or_more import one_or_more

_SectionT = TypeVar("_SectionT", bound=Section)

_MAX_ROUNDS = 20
"""How often a job with invalid values is validated again, to find the errors that the invalid ones concealed."""


def override_texts(overrides: str | Iterable[str]) -> tuple[str, ...]:
    """Return overrides as a tuple of texts; one text is one override.

    Raises:
        UserError: They are a mapping.
    """
    if isinstance(overrides, Mapping):
        raise UserError(
            "overrides are texts such as train.epochs=3, not a mapping",
            'write ["train.epochs=3"], or job.with_values({"train.epochs": 3})',
        )
    return one_or_more(overrides)


def apply_overrides(
    document: Document, overrides: Iterable[str], *, instances: int | None = None
) -> None:
    """Apply `--set path=value` options to a document, and then `--instances`.

    Raises:
        UserError: an override is not `path=value`.
    """
    for text in overrides:
        name, equals, value = text.partition("=")
        path: FieldPath = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise UserError(
                f"--set {text}: expected path=value", "for example --set cluster.spot=true"
            )
        document.override(path, parse_scalar(value, f"--set {text}"), f"--set {text}")
    if instances is not None:
        document.override(("cluster", "instances"), instances, f"--instances {instances}")


def validate_document(
    model: type[_SectionT], document: Document
) -> tuple[_SectionT | None, list[Problem], set[FieldPath]]:
    """Validate a document; replace invalid values by legal ones and repeat, until every value has been validated.

    Returns:
        The model (None when too little is valid), every problem, and the paths of the values that were replaced.
    """
    problems: dict[tuple[FieldPath, str], Problem] = {}
    invalid: set[FieldPath] = set()
    data = copy.deepcopy(document.data)
    _drop_empty(data, model)
    for _ in range(_MAX_ROUNDS):
        try:
            spec = model.model_validate(data, context=DEFER_CROSS_FIELD_CHECKS)
        except ValidationError as error:
            for diagnostic in diagnostics_of(model, error):
                if not diagnostic.concerns(invalid):
                    location = document.location_of(diagnostic.path, is_key=diagnostic.is_key)
                    problems[diagnostic.path, diagnostic.message] = to_problem(diagnostic, location)
                replaced = _replace(data, diagnostic.path, _required_examples(model))
                if not diagnostic.is_key or replaced != diagnostic.path:
                    invalid.add(diagnostic.path)
        else:
            return spec, list(problems.values()), invalid
    return None, list(problems.values()), invalid


def _drop_empty(data: Any, section: type[Section]) -> None:
    """Remove fields without a value, such as a section of which every line is commented out."""
    for name, field in section.model_fields.items():
        value = data.get(name) if isinstance(data, dict) else None
        if value is None and isinstance(data, dict):
            data.pop(name, None)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Section):
                _drop_empty(value, kind)


def _replace(data: Any, path: FieldPath, examples: Mapping[FieldPath, Any]) -> FieldPath:
    """Remove the value at a path, or replace it by its example where the field is required.

    Returns:
        The path of what was removed, which is the complete list for a value in a list.
    """
    for depth in range(len(path)):
        if not isinstance(data, dict):
            break
        if depth == len(path) - 1 or not isinstance(data.get(path[depth]), dict):
            data.pop(path[depth], None)
            example = examples.get(path[: depth + 1]) or examples.get(path[depth : depth + 1])
            if example is not None:
                data[path[depth]] = copy.deepcopy(example)
            return path[: depth + 1]
        data = data[path[depth]]
    return path


@functools.cache
def _required_examples(model: type[Section]) -> Mapping[FieldPath, Any]:
    """Return examples of the required fields by field name; of two fields of one name, the outer one's."""
    examples: dict[FieldPath, Any] = {}
    for _, section in sections_of(model):
        for name, field in section.model_fields.items():
            if field.is_required() and field.examples:
                examples.setdefault((name,), field.examples[0])
    return examples


_SHOWN_CHARACTERS = 60


def change_document(
    name: str, content: dict[str, Any], values: Mapping[str, Any], known: Document | None
) -> Document:
    """Return the document of a job with other values.

    Args:
        name: Name of the job's class.
        content: The job, as a job file has it.
        values: New values by path such as `train.epochs`.
        known: The document that the job comes from, for the locations of the unchanged fields; None without one.

    Raises:
        UserError: these are no values by path, a path is empty, or leads below a single value.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"with_values: expected values by path, got {values!r}",
            'for example spec.with_values({"train.epochs": 2})',
        )
    built = f"{name}(...)"
    document = Document(built, content, {(): SourceLocation(built)})
    if known is not None:
        document = Document(known.file, document.data, dict(known.values), dict(known.keys))
    for path, value in values.items():
        parts = tuple(str(path).split("."))
        if not all(parts):
            raise UserError(
                f"with_values: expected the path of a field, got {path!r}",
                'for example "train.epochs"',
            )
        origin = f"with_values({_show(path, value)})"
        document.override(parts, _to_plain(value), origin)
        # A misspelled section has no location yet.
        for depth in range(1, len(parts)):
            document.keys.setdefault(parts[:depth], SourceLocation(origin))
    return document


def _to_plain(value: Any) -> Any:
    """Return a value as a job file has it: paths are text, tuples are lists, NumPy's numbers are Python's."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(inner) for inner in value]
    # A number of NumPy has no dimensions, an array of one number has.
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return value


def _show(path: str, value: Any) -> str:
    text = f"{path!r}: {value!r}"
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[: _SHOWN_CHARACTERS - 3]}..."
    return f"{{{text}}}"
