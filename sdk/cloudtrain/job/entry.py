"""The Task or script that a job names, read as source text: nothing of it is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.job.document import Place
from cloudtrain.job.problems import Finding
from cloudtrain.support.field_path import FieldPath


def find_module(directory: Path, module: str) -> Path | None:
    """Return the file of a module below a code folder, or None."""
    from cloudtrain_runtime.contract import class_source

    return class_source.find_module(directory, module)


def check_task(directory: Path, task: str, arguments: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield what is wrong with a Task and its arguments.

    Only what the text proves: a class that is imported or built otherwise is left to the run itself.

    Args:
        directory: The code folder.
        task: `module:Class`.
        arguments: `code.args`; None looks at none.
    """
    from cloudtrain_runtime.contract import task_signatures

    for found in task_signatures.check_task(directory, task, arguments or {}):
        at: FieldPath = found.field or ("code", "task")
        if at[:2] == ("code", "args") and arguments is None:
            continue
        place = Place(_named(directory / found.file), found.line, found.column) if found.file else None
        yield Finding(found.message, at, found.hint, is_key=len(at) > len(("code", "args")), place=place)


def check_methods(directory: Path, task: str, needed: Mapping[str, FieldPath]) -> Iterator[Finding]:
    """Yield optional methods that a job needs and its Task does not have, as far as the text proves it.

    Args:
        directory: The code folder.
        task: `module:Class`.
        needed: The job's field that needs it, by method.
    """
    from cloudtrain_runtime.contract import task_signatures

    for method, at in needed.items():
        if task_signatures.lacks_method(directory, task, method):
            name = task.rpartition(":")[2]
            message = f"it needs a method {method}() of {name}, which tells how its layers are split"
            yield Finding(message, at, f"write it (docs/how-to/parallelism.md shows one), or remove {at[-1]}")


def check_syntax(path: Path, at: FieldPath) -> Iterator[Finding]:
    """Yield what keeps Python from reading a file."""
    from cloudtrain_runtime.contract.class_source import UnreadableFile, parse

    broken = parse(path, str(path))
    if isinstance(broken, UnreadableFile):
        line = f":{broken.line}" if broken.line else ""
        version = ".".join(map(str, sys.version_info[:2]))
        hint = f"mend it, or, where it needs a newer Python than this {version}, run cloudtrain with that one"
        yield Finding(f"{path}{line} {broken.message}", at, hint)


def _named(path: Path) -> str:
    """Return a path as it is told: from the working folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
