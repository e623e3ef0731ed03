"""Checks that a job's values are not secrets, because everyone who may describe a job can read its request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import error
from cloudtrain.secrets.values import contains_secret, is_secret_argument, is_secret_variable
from cloudtrain.support.field_path import FieldPath

_MESSAGE = "looks like a secret, and everyone who may describe the job can read it"


def check_secrets(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject values that look like keys or tokens. A field gets one error."""
    named = list(_check_named_values(spec))
    yield from named
    rejected = {each.path for each in named}
    for at, value in _texts(spec.to_document(), ()):
        if at not in rejected and contains_secret(value):
            variable = str(at[-1]) if at[:2] == ("code", "env") else "NAME"
            yield error(at, f"contains a value that {_MESSAGE}", _reference(variable))


def _check_named_values(spec: JobSpec) -> Iterator[Diagnostic]:
    for name, value in spec.code.variables.items():
        if is_secret_variable(name, value):
            yield error(("code", "env", name), _MESSAGE, _reference(name))
    for name, value in spec.tags.items():
        if is_secret_variable(name, value):
            yield error(("tags", name), _MESSAGE, _reference(_variable(name)))
    for at, name, value in _arguments(spec):
        if is_secret_argument(name, value):
            yield error(at, _MESSAGE, f"have the code read it from its environment: {_reference(_variable(name))}")


def _variable(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()


def _reference(variable: str) -> str:
    return f"store it in AWS Secrets Manager, and write code.env.{variable}: {{secret: <its name or ARN>}}"


def _arguments(spec: JobSpec) -> Iterator[tuple[FieldPath, str, str]]:
    args = spec.code.args
    if isinstance(args, dict):
        yield from ((("code", "args", name), str(name), str(value)) for name, value in args.items())
        return
    for index, (word, following) in enumerate(zip(args, [*args, "--"][1:], strict=True)):
        name, equals, value = str(word).partition("=")
        if name.startswith("-") and (equals or not str(following).startswith("-")):
            at = index if equals else index + 1
            yield ("code", "args", at), name.lstrip("-"), value if equals else str(following)


def _texts(value: Any, at: FieldPath) -> Iterator[tuple[FieldPath, str]]:
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _texts(part, (*at, key))
