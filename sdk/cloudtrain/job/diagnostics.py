"""Diagnostics about a job: what is wrong with a field, and pydantic's validation errors in cloudtrain's words."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from cloudtrain.errors import Problem, did_you_mean
from cloudtrain.job.document import SourceLocation, dotted
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import number_with_commas

DEFER_CROSS_FIELD_CHECKS = object()
"""Validation context that skips the checks between fields, because the caller runs them on the validated job."""


class Severity(StrEnum):
    """What a diagnostic means for the plan."""

    ERROR = "error"
    """It prevents the plan."""
    WARNING = "warning"
    DECISION = "decision"
    """What cloudtrain decided itself and why."""


@dataclass(frozen=True)
class Diagnostic:
    """An error, warning or decision about a job. `Problem` is an error with its location in the job file.

    Attributes:
        message: What is wrong and what was expected; of a warning or decision one line.
        path: Path of the field; not used for warnings and decisions.
        hint: The nearest legal value or what to do.
        compared: Every field that was compared, where `path` is not the only one. When one of them is invalid by
            itself, the diagnostic is meaningless and is dropped.
        is_key: Whether the field's name is wrong, not its value.
        location: The location of the error, if that is a file of the code.
        severity: What it means for the plan.
    """

    message: str
    path: FieldPath = ()
    hint: str = ""
    compared: tuple[FieldPath, ...] = ()
    is_key: bool = False
    location: SourceLocation | None = None
    severity: Severity = Severity.ERROR

    def below(self, prefix: FieldPath) -> Diagnostic:
        """Return the diagnostic with a prefix before its paths."""
        return replace(
            self,
            path=(*prefix, *self.path),
            compared=tuple((*prefix, *other) for other in self.compared),
        )

    def concerns(self, paths: Iterable[FieldPath]) -> bool:
        """Return whether one of the compared fields is, contains, or is contained in one of these paths."""
        return any(
            field[: len(path)] == path or path[: len(field)] == field
            for field in (self.compared or (self.path,))
            for path in paths
        )


def field_error(message: str, *, hint: str = "") -> PydanticCustomError:
    """Return an error of a field for its validator to raise."""
    return field_errors([Diagnostic(message, hint=hint)])


def field_errors(diagnostics: Iterable[Diagnostic]) -> PydanticCustomError:
    """Return one error for a validator to raise that carries several diagnostics."""
    every = tuple(diagnostics)
    # The text is for callers of pydantic; `diagnostics_of` reads the diagnostics.
    text = "; ".join(diagnostic.message for diagnostic in every)
    return PydanticCustomError("cloudtrain", "{text}", {"diagnostics": every, "text": text})


def to_problem(diagnostic: Diagnostic, location: SourceLocation) -> Problem:
    """Return the problem that reports a diagnostic, at its own location in the code or else at that of its field."""
    at = diagnostic.location or location
    path = "" if diagnostic.location is not None else dotted(diagnostic.path)
    return Problem(at.file, at.line, at.column, path, diagnostic.message, diagnostic.hint)


def diagnostics_of(model: type[BaseModel], error: ValidationError) -> list[Diagnostic]:
    """Return the diagnostics of a validation error of a model, without duplicates."""
    found: dict[tuple[FieldPath, str], Diagnostic] = {}
    for details in error.errors(include_url=False):
        for diagnostic in _translate(model, details):
            found.setdefault((diagnostic.path, diagnostic.message), diagnostic)
    # Each member of a union reports its own error: of these, keep the most specific one.
    specific = {
        each.path for each in found.values() if not each.message.startswith("expected one of")
    }
    return [
        each
        for each in found.values()
        if each.path not in specific or not each.message.startswith("expected one of")
    ]


def _translate(model: type[BaseModel], details: ErrorDetails) -> list[Diagnostic]:
    if details["type"] == "cloudtrain":
        path = _field_path(model, details["loc"])
        return [diagnostic.below(path) for diagnostic in details["ctx"]["diagnostics"]]
    path, message, hint = _describe(model, details)
    return [Diagnostic(message, path, hint, is_key=details["type"] == "extra_forbidden")]


def _describe(  # noqa: PLR0911 (one return per kind of error)
    model: type[BaseModel], details: ErrorDetails
) -> tuple[FieldPath, str, str]:
    path = _field_path(model, details["loc"])
    context: Mapping[str, Any] = details.get("ctx", {})
    kind = details["type"]
    given = details["input"]
    if kind == "extra_forbidden":
        section = _model_at(model, path[:-1])
        legal = sorted(section.model_fields) if section is not None else []
        return (
            path,
            "unknown field",
            _place_of(model, path, given) or did_you_mean(str(path[-1]), legal),
        )
    example = _example(model, path)
    if kind == "missing":
        return path, "required field is missing", example
    if kind == "literal_error":
        legal = _literals(model, path) or [str(context.get("expected", ""))]
        hint = did_you_mean(str(given), legal, f"use {legal[0]}")
        return path, f'expected one of {", ".join(legal)}, got "{given}"', hint
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return (
            path,
            f"expected a mapping of fields, got {_show(given)}",
            _fields_of(path, given) or example or "write key: value, indented below",
        )
    for bound, words in _BOUNDS.items():
        if bound in context:
            limit = context[bound]
            return path, f"expected {words} {limit:g}, got {_show(given)}", f"use {words} {limit:g}"
    for prefix, (expected, hint) in _EXPECTED.items():
        if kind.startswith(prefix):
            meant = _number_of(given) if isinstance(given, str) else ""
            is_number = kind.startswith(("int_", "float_"))
            near = f"did you mean {meant}?" if meant and is_number else ""
            if kind.startswith(("tuple_", "list_")):
                near = _list_of(path, given)
            return path, f"expected {expected}, got {_show(given)}", near or example or hint
    message = details["msg"].replace("Input should", "must").replace("Value error, ", "")
    return path, f"{message}, got {_show(given)}", example


def _number_of(text: str) -> str:
    """Return the number that a text means, such as `1000` for `1,000` and `2` for `2,`; else an empty string."""
    if text.endswith(",") and text[:-1].replace(".", "", 1).isdecimal():
        return text[:-1]
    return number_with_commas(text)


def _list_of(path: FieldPath, given: object) -> str:
    """Return a hint for a list that was written as one text; an empty string for another value."""
    if not isinstance(given, str):
        return ""
    words = [word.strip() for word in given.split(",") if word.strip()]
    if path[-1] == "command":
        try:
            words = shlex.split(given)
        except ValueError:  # an open quote
            return ""
    return f"write {path[-1]}: {to_flow_style(words)}" if words else ""


def _fields_of(path: FieldPath, given: object) -> str:
    """Return a hint for options that were written as one text, as on a command line; else an empty string."""
    if not isinstance(given, str) or not given.startswith("-"):
        return ""
    try:
        fields = options_as_fields(shlex.split(given))
    except ValueError:  # an open quote
        return ""
    return f"write {path[-1]}: {fields}" if fields else ""


def options_as_fields(words: list[str]) -> str:
    """Return options such as `--lr 0.1 --fast` as a mapping in YAML; an empty string if other words are among them."""
    fields: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            fields[name] = value if equals else True
        elif not name or fields[name] is not True:
            return ""
        else:
            fields[name] = word
    inner = ", ".join(f"{each}: {_plain(value)}" for each, value in fields.items())
    return f"{{{inner}}}" if fields else ""


def _plain(value: str | bool) -> str:
    # Numbers stay numbers: as texts they would get quotes.
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) is not None
    return str(value) if is_plain else to_flow_style(value)


def _place_of(model: type[BaseModel], path: FieldPath, given: object) -> str:
    """Return a hint for a field in the wrong section, or for a word of another tool; else an empty string."""
    name = str(path[-1])
    if name in _UNITS and path[:-1] in ((), ("limits",)):
        number = getattr(given, "text", "")
        return f"did you mean limits.runtime{f': {number}{_UNITS[name]}' if number else ''}?"
    if name in OWN_ARGUMENTS:
        return f"only your code decides it: code.args.{name} passes it there"
    if name == "role":
        return "the role is a setting of the account, not of a job: CLOUDTRAIN_ROLE, or role in cloudtrain.toml"
    sections = {section: _model_at(model, (section,)) for section in model.model_fields}
    places = [
        f"{section}.{name}"
        for section, fields in sections.items()
        if fields and name in fields.model_fields
    ]
    # `outputs` at the top level is closer to `output` than to a field of another section.
    places = (
        difflib.get_close_matches(name, sections, n=1, cutoff=0.9) + places if places else places
    )
    own = _model_at(model, path[:-1])
    is_misspelt = own is not None and difflib.get_close_matches(
        name, own.model_fields, n=1, cutoff=0.8
    )
    if not places and is_misspelt:  # `train.epoch` is a field of its own section
        return ""
    if not places and COMMON_WORDS.get(name, "").startswith("train."):
        return f"did you mean {COMMON_WORDS[name]} (of a Task), or code.args.{name} (of a script)?"
    if not places:
        places = [words[name] for words in (ESTIMATOR_WORDS, COMMON_WORDS) if name in words]
    return f"did you mean {' or '.join(places)}?" if places else ""


ESTIMATOR_WORDS = {
    "base_job_name": "name",
    "checkpoint_s3_uri": "checkpoint.uri",
    "entry_point": "code.script",
    "environment": "code.env",
    "framework_version": "cluster.framework",
    "hyperparameters": "code.args",
    "image_uri": "cluster.image",
    "instance_count": "cluster.instances",
    "max_run": "limits.runtime",
    "metric_definitions": "metrics",
    "security_group_ids": "cluster.network",
    "source_dir": "code.directory",
    "use_spot_instances": "cluster.spot",
    "volume_size": "cluster.volume",
}
"""Arguments of SageMaker's estimators, and the fields of job.yaml that stand for them."""

COMMON_WORDS = {
    "amp": "train.precision",
    "bs": "train.batch_size",
    "cmd": "code.command",
    "dataset": "data",
    "epoch": "train.epochs",
    "gpus": "cluster.instance_type",
    "grad_accum": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "lr": "train.learning_rate",
    "machine": "cluster.instance_type",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "nnodes": "cluster.instances",
    "nodes": "cluster.instances",
    "nproc_per_node": "cluster.processes_per_instance",
    "num_epochs": "train.epochs",
    "num_gpus": "cluster.instance_type",
    "num_nodes": "cluster.instances",
    "num_train_epochs": "train.epochs",
    "num_workers": "train.workers",
    "timeout": "limits.runtime",
}
"""Words of other tools and of scripts, and the fields of job.yaml that stand for them."""
OWN_ARGUMENTS = ("momentum", "optimizer", "wd", "weight_decay")
"""Words for what only the code decides."""
_PLAIN = re.compile(r"[\w./+-]+")
_UNITS = {"days": "d", "hours": "h", "minutes": "m", "seconds": "s"}

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_EXPECTED = {
    "finite_number": ("a finite number", "write digits, such as 2"),
    "int_": ("an integer", "write digits only, such as 2"),
    "float_": ("a number", "such as 0.1 or 3e-4"),
    "bool_": ("true or false", "write true or false"),
    "string_": ("text", "write it in one line, in quotes where it could be read as something else"),
    "tuple_": ("a list", "write it in brackets: [first, second]"),
    "list_": ("a list", "write it in brackets: [first, second]"),
}


def _example(model: type[BaseModel], path: FieldPath) -> str:
    """Return a hint with a legal value of the field, or an empty string when the model has no example."""
    field = _field_at(model, path)
    if field is None or not field.examples:
        return ""
    return f"for example {path[-1]}: {to_flow_style(field.examples[0])}"


def _field_at(model: type[BaseModel], path: FieldPath) -> FieldInfo | None:
    section = _model_at(model, path[:-1]) if path else None
    return section.model_fields.get(str(path[-1])) if section is not None else None


def to_flow_style(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.removesuffix("\n...\n").rstrip()


def _show(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 (short enough for one line of a terminal)


def _field_path(model: type[BaseModel], loc: tuple[str | int, ...]) -> FieldPath:
    """Return pydantic's location without the parts that name union members instead of fields."""
    path: FieldPath = ()
    current: type[BaseModel] | None = model
    for part in loc:
        if (
            part in _VARIABLE_KINDS
            and path[:2] == ("code", "env")
            and len(path) == len(_VARIABLE_PATH)
        ):
            continue
        if (
            current is not None
            and isinstance(part, str)
            and part not in current.model_fields
            and part != loc[-1]
        ):
            break
        is_in_union = current is None and path and path[0] != "data"
        if is_in_union and isinstance(part, str) and ("[" in part or part in _UNION_TAGS):
            break
        path = (*path, part)
        current = _model_at(model, path)
    return path


_VARIABLE_PATH = ("code", "env", "NAME")
_VARIABLE_KINDS = ("Secret", "text")
"""Parts of pydantic's location that name the kind of an environment variable."""
_UNION_TAGS = ("int", "str", "bool", "float", "constrained-int", "constrained-float", "dict")


def _model_at(model: type[BaseModel], path: FieldPath) -> type[BaseModel] | None:
    """Return the section at a path, or None when there is a plain value."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue  # an entry of a list of sections
        if not _is_section(current):
            current = next(filter(_is_section, type_arguments(current)), None)
            continue
        field = current.model_fields.get(str(part))
        if field is None:
            return None
        is_mapping = getattr(field.annotation, "__origin__", None) is dict
        current = (
            field.annotation
            if is_mapping
            else next(filter(_is_section, type_arguments(field.annotation)), None)
        )
    return current if _is_section(current) else None


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def type_arguments(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and everything in its type arguments."""
    yield annotation
    for argument in get_args(annotation):
        yield from type_arguments(argument)


def _literals(model: type[BaseModel], path: FieldPath) -> list[str]:
    field = _field_at(model, path)
    return (
        []
        if field is None
        else [kind for kind in type_arguments(field.annotation) if isinstance(kind, str)]
    )
