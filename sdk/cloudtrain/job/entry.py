"""Static checks of the Task or script that a job names: its source is parsed and never imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.document import SourceLocation
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract import task_signatures
from cloudtrain_runtime.contract.task_methods import TaskDiagnostic


def check_task(directory: Path, task: str, arguments: Mapping[str, Any] | None) -> Iterator[Diagnostic]:
    """Yield the errors in a Task and its arguments that its source proves.

    A class that is imported or created dynamically is not checked.

    Args:
        directory: The code folder.
        task: `module:Class`.
        arguments: `code.args`; None skips the check of the arguments.
    """
    for found in task_signatures.check_task(directory, task, arguments or {}):
        at: FieldPath = found.field or ("code", "task")
        if at[:2] == ("code", "args") and arguments is None:
            continue
        location = None
        if found.file:
            location = SourceLocation(_display_path(directory / found.file), found.line, found.column)
        is_key = len(at) > len(("code", "args"))
        yield Diagnostic(found.message, at, found.hint, is_key=is_key, location=location)


def check_methods(directory: Path, task: str, required: Mapping[str, FieldPath]) -> Iterator[Diagnostic]:
    """Yield an error for each method that a job requires and that its Task's source proves to be missing.

    Args:
        directory: The code folder.
        task: `module:Class`.
        required: Path of the field that requires the method, by the method's name.
    """
    for method, at in required.items():
        if task_signatures.lacks_method(directory, task, method):
            name = task.rpartition(":")[2]
            message = f"requires a method {method}() of {name}, which defines how its layers are split"
            yield Diagnostic(message, at, f"write it (docs/how-to/parallelism.md shows one), or remove {at[-1]}")


def check_syntax(path: Path, at: FieldPath) -> Iterator[Diagnostic]:
    """Yield an error when Python cannot parse a file; `at` is the field that names it."""
    broken = task_signatures.parse(path, str(path))
    if isinstance(broken, TaskDiagnostic):
        line = f":{broken.line}" if broken.line else ""
        version = ".".join(map(str, sys.version_info[:2]))
        hint = f"fix it, or, if it needs a newer Python than {version}, run cloudtrain with that version"
        yield Diagnostic(f"{path}{line} {broken.message}", at, hint)


def _display_path(path: Path) -> str:
    """Return a path for messages: relative to the working folder if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
