"""The public surface of the installed version: every name that docs/reference/stability.md promises to keep.

A nested mapping, so that two versions can be compared: a name is a key, what must stay equal is a value.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from support.reference_pages import commands, item_of, type_of

import cloudtrain
import cloudtrain_runtime
from cloudtrain import errors
from cloudtrain.cli import cli
from cloudtrain.cli.variables import NAMES, PREFIX
from cloudtrain.job.schema import job_schema
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import SETTINGS
from cloudtrain_runtime.contract.events import EVENTS
from cloudtrain_runtime.contract.json_checks import ObjectSchema
from cloudtrain_runtime.contract.run_config import RunConfig
from written_by.formats import FORMATS

JSON_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
_FEATURES = ("evaluation", "rehearsal", "serving", "setup", "sweeps")
_PLAIN = (str, int, float, bool, type(None), tuple)


def read_surface() -> dict[str, Any]:
    """Return the public surface."""
    return {
        "commands": _commands(),
        "environment variables": {f"{PREFIX}{name}": {} for name in NAMES},
        "events": {kind: dict(_event_fields(fields)) for kind, fields in EVENTS.items()},
        "exit codes": {
            name: value for name, value in vars(errors).items() if name.startswith("EXIT_")
        },
        "formats": dict(FORMATS),
        "job.yaml": dict(_job_fields()),
        "json": _json_keys(),
        "python": _python(),
        "run.json": _fields_of(RunConfig),
        "settings": {name: {} for name in SETTINGS},
        "states": {state.value: {} for state in State},
    }


def _commands() -> dict[str, Any]:
    return {
        name: dict(_options(command.params))
        for name, command in commands(cli, "cloudtrain")
        if not command.hidden
    }


def _options(found: Sequence[click.Parameter]) -> Iterator[tuple[str, Any]]:
    arguments = [each for each in found if isinstance(each, click.Argument)]
    for at, argument in enumerate(arguments, start=1):
        # Nobody writes the name of an argument.
        yield f"argument {at}", _option(argument)
    for option in found:
        if option not in arguments:
            yield from ((name, _option(option)) for name in (*option.opts, *option.secondary_opts))


def _option(option: click.Parameter) -> dict[str, Any]:
    described = {
        "is_flag": bool(getattr(option, "is_flag", False)),
        "is_repeatable": bool(option.multiple or option.nargs == -1),
        "default": _plain(option.to_info_dict()["default"]),
        "required": option.required,
        "choices": {str(each): {} for each in getattr(option.type, "choices", ())},
    }
    return _without_empty(described)


def _without_empty(described: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing, so that the file is small."""
    return {name: value for name, value in described.items() if value not in (None, False, {})}


def _event_fields(schema: ObjectSchema, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, check in {**schema.optional, **schema.required}.items():
        item = item_of(check)
        type_ = "list of objects" if isinstance(item, ObjectSchema) else type_of(check)
        yield f"{above}{name}", _without_empty({"type": type_, "always": name in schema.required})
        if isinstance(item, ObjectSchema):
            yield from _event_fields(item, f"{above}{name}[].")


def _job_fields() -> Iterator[tuple[str, Any]]:
    schema = job_schema()
    for section, content in {"JobSpec": schema, **schema["$defs"]}.items():
        for name, field in content.get("properties", {}).items():
            yield (
                f"{section}.{name}",
                _without_empty(
                    {
                        "types": {each: {} for each in sorted(set(_types(field)))},
                        "default": _written(field.get("default")),
                        "required": name in content.get("required", ()),
                    }
                ),
            )


def _written(default: Any) -> str | None:
    """Return a default as JSON, because what a mapping contains is no part of the surface."""
    return None if default is None else json.dumps(default, sort_keys=True)


def _types(field: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2]
    yield from map(str, field.get("enum", ()))
    if "const" in field:
        yield str(field["const"])
    kinds = field.get("type", ())
    yield from [kinds] if isinstance(kinds, str) else kinds
    for each in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from _types(each)
    if "items" in field:
        yield from (f"list of {each}" for each in _types(field["items"]))
    if isinstance(field.get("additionalProperties"), Mapping):
        yield from (f"mapping to {each}" for each in _types(field["additionalProperties"]))


def _json_keys() -> dict[str, Any]:
    page = JSON_PAGE.read_text(encoding="utf-8") + "\n\n"
    tables = re.findall(r"<!-- keys: (\w+) -->\n(.*?)\n\n", page, flags=re.DOTALL)
    return {
        name: {key: {} for key in re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)}
        for name, table in tables
    }


def _python() -> dict[str, Any]:
    modules = {"cloudtrain": cloudtrain, "cloudtrain_runtime": cloudtrain_runtime}
    for feature in _FEATURES:
        modules[f"cloudtrain.{feature}"] = importlib.import_module(f"cloudtrain.features.{feature}")
    found = {
        f"{module}.{name}": _describe(getattr(content, name))
        for module, content in modules.items()
        for name in content.__all__
    }
    kinds = [each for each in vars(errors).values() if inspect.isclass(each)]
    for kind in kinds:
        if issubclass(kind, errors.CloudtrainError):
            bases = {base.__name__: {} for base in kind.__mro__ if base is not object}
            found[f"cloudtrain.errors.{kind.__name__}"] = {"is_a": bases}
    return found


def _describe(value: Any) -> dict[str, Any]:
    if inspect.isclass(value):
        return {"kind": "class", "members": dict(_members(value))}
    if inspect.ismodule(value):
        names = getattr(value, "__all__", ())
        return {"kind": "module", "members": {name: {} for name in names}}
    if callable(value):
        return {"kind": "function", "parameters": _parameters(value)}
    return {"kind": "value"}


def _members(value: type) -> Iterator[tuple[str, Any]]:
    if issubclass(value, enum.Enum):
        yield from ((name, {"value": str(each.value)}) for name, each in value.__members__.items())
    elif _has_own_init(value):
        yield "__init__", {"parameters": _parameters(value.__init__)}  # type: ignore[misc]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    for name in [*(field.name for field in fields), *getattr(value, "model_fields", {})]:
        if _is_public(name):
            yield name, {}
    for kind in reversed(value.__mro__):
        if kind.__module__.startswith("cloudtrain"):
            yield from _own_members(kind)


def _has_own_init(value: type) -> bool:
    """Whether the constructor is written in this project, in the class or in a base of it."""
    owner = next(kind for kind in value.__mro__ if "__init__" in vars(kind))
    return owner.__module__.startswith("cloudtrain")


def _own_members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in list(vars(kind).items()):
        function = getattr(member, "__func__", member)
        if not _is_public(name):
            continue
        if inspect.isfunction(function):
            yield name, {"parameters": _parameters(function)}
        elif hasattr(member, "__get__"):
            yield name, {}


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name != "model_config"


def _parameters(function: Any) -> dict[str, Any]:
    found = {}
    for at, each in enumerate(inspect.signature(function).parameters.values()):
        by_position = each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        is_several = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        has_default = each.default is not inspect.Parameter.empty
        described = {
            "kind": each.kind.name,
            "position": at if by_position else None,
            "default": _plain(each.default) if has_default else None,
            "required": not has_default and not is_several,
        }
        found[each.name] = _without_empty(described)
    return found


def _plain(value: Any) -> Any:
    """Return a default that can be compared: a plain value, or the name of its type."""
    if value == () or isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, _PLAIN) and not isinstance(value, tuple):
        return value
    return type(value).__name__


def _fields_of(kind: type) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(kind):
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        found[field.name] = _without_empty({"type": str(field.type), "required": is_required})
    return found
