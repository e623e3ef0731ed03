"""Descriptions and default values of job.yaml's fields, for the JSON Schema and the reference page."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from cloudtrain.job.fields import Section
from cloudtrain.job.sections.checkpoint import Checkpoint
from cloudtrain.support.units import format_duration


@functools.cache
def field_docs(section: type[Section]) -> Mapping[str, str]:
    """Return the docstring of each field of a section, and under an empty name that of the section.

    They are parsed from the source text, because pydantic could collect them only at every import of the models.
    """
    module = ast.parse(textwrap.dedent(inspect.getsource(section)))
    definition = next(node for node in module.body if isinstance(node, ast.ClassDef))
    docs = {"": (ast.get_docstring(definition) or "").split("\n\n")[0].replace("\n", " ")}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            docs[statement.target.id] = str(following.value.value) if is_docstring else ""  # type: ignore[attr-defined]
    return docs


def display_default(section: str, name: str, default: Any) -> Any:
    """Return the default of a field as a job file spells it."""
    if (section, name) in (("Limits", "runtime"), ("Limits", "hang")):
        return format_duration(default)
    if (section, name) == ("Checkpoint", "every"):
        return str(Checkpoint().every)
    return f"{default}GB" if (section, name) == ("Cluster", "volume") else default
