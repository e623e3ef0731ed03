"""Checks of `code.include`: folders outside of the code folder that become importable by their names."""

from __future__ import annotations

import keyword
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.job.diagnostics import Diagnostic

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec

_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


def check_include(spec: JobSpec, index: int, folder: Path) -> Iterator[Diagnostic]:
    """Yield what is wrong with an entry of `code.include`, whose folder exists: the first mistake."""
    found = next((each for check in _CHECKS for each in check(spec, index, folder)), None)
    if found is not None:
        yield Diagnostic(found[0], ("code", "include", index), found[1])


_Found = Iterator[tuple[str, str]]
"""Messages with their hints."""


def _overlap(spec: JobSpec, index: int, folder: Path) -> _Found:  # noqa: ARG001 (the checks' signature)
    inside, code = folder.resolve(), spec.code_directory.resolve()
    if inside.is_relative_to(code):
        yield f"{folder} is in the code folder", "remove it: the code folder travels as it is"
    elif code.is_relative_to(inside):
        yield f"{folder} contains the code folder", "name the package in it alone"


def _unimportable(spec: JobSpec, index: int, folder: Path) -> _Found:  # noqa: ARG001
    name, packages = folder.name, _packages_hint(spec, folder)
    if not name.isidentifier() or keyword.iskeyword(name):
        hint = ", or ".join(filter(None, (packages, "rename the folder")))
        yield f'the code imports an included folder by its name, and "{name}" is not one', hint
    is_project = any((folder / file).is_file() for file in _PROJECT_FILES) and not (folder / "__init__.py").is_file()
    if is_project and packages:
        yield f"{folder} is a project; import {name} would not find the package in it", packages


def _name_clash(spec: JobSpec, index: int, folder: Path) -> _Found:
    name, directory = folder.name, spec.code_directory
    if name in sys.stdlib_module_names or name == "cloudtrain_runtime":
        owner = "cloudtrain" if name == "cloudtrain_runtime" else "Python's standard library"
        yield f"{name} would hide the module of {owner}", "rename the folder"
    if (directory / name).is_dir() or (directory / f"{name}.py").is_file():
        message = f"the code folder has a module {name}, too, which would be imported in its place"
        yield message, "rename one of the two"
    names = [Path(os.path.normpath(spec.base / other)).name for other in spec.code.include[:index]]
    if name in names:
        message = f"{spec.code.include[names.index(name)]} has the same name, {name}"
        yield message, "remove or rename one of the two"


_CHECKS = (_overlap, _unimportable, _name_clash)


def _packages_hint(spec: JobSpec, folder: Path) -> str:
    """Return a hint with the packages in a folder, or an empty text."""
    found = [os.path.relpath(each, spec.base) for each in _packages(folder)]
    return f"did you mean {' or '.join(found[:3])}?" if found else ""


def _packages(folder: Path) -> Iterator[Path]:
    for parent in (folder / "src", folder):
        if parent.is_dir():
            found = sorted(each.parent for each in parent.glob("*/__init__.py"))
            yield from (each for each in found if each.name.isidentifier() and each.name not in ("test", "tests"))
