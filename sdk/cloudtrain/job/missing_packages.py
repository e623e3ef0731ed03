"""Packages that a script imports first and that this interpreter lacks. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.errors import Problem
from cloudtrain.job.requirements import read_requirements
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.certain_code import first_imports
from cloudtrain.job.static_analysis.module_search import entry_file
from cloudtrain.job.static_analysis.syntax import absolute_names
from cloudtrain.support.installation import pip_install
from cloudtrain_runtime.contract.python_source import find_module
from cloudtrain_runtime.contract.task_signatures import parse

_PATH_VARIABLE = "PYTHONPATH"


@dataclass(frozen=True)
class MissingPackage:
    """A package that an import needs.

    Attributes:
        module: The imported module's first name.
        package: Its name on PyPI, or an empty string if it is not known.
        line, column: Place of the import, from 1.
    """

    module: str
    package: str
    line: int
    column: int


def find_missing(entry: Path, own_folders: Iterable[Path] = ()) -> Iterator[MissingPackage]:
    """Yield the packages that a script needs at once and that this interpreter lacks.

    Only the imports at its top count, up to the first statement or module of its own that could install packages,
    extend the import path or end the program.

    Args:
        entry: The script.
        own_folders: Folders besides the script's in which modules of the job are.
    """
    tree = parse(entry, str(entry))
    if not isinstance(tree, ast.Module):
        return
    folders = (entry.parent, *own_folders)
    for statement in first_imports(tree.body):
        for name in absolute_names(statement):
            module = name.partition(".")[0]
            if any(find_module(each, module) or (each / module).is_dir() for each in folders):
                return
            if not _is_importable(module):
                yield MissingPackage(
                    module=module,
                    package=catalog.known_package_of(module) or "",
                    line=statement.lineno,
                    column=statement.col_offset + 1,
                )


def check_packages(spec: JobSpec) -> Iterator[Problem]:
    """Yield a problem for each package without which a local run of a job would end at once."""
    code = spec.code
    entry = entry_file(spec)
    if entry is None or _PATH_VARIABLE in code.env or _has_code_before(spec, entry):
        return
    folders = {spec.code_directory, *(folder.parent for folder in spec.includes.values())}
    for missing in find_missing(entry, folders):
        here = Path.cwd()
        shown = entry.relative_to(here) if entry.is_relative_to(here) else entry
        message = f"this machine has no module {missing.module}: the run would end with ModuleNotFoundError"
        hint = _how_to_install(spec, missing)
        yield Problem(
            file=str(shown),
            line=missing.line,
            column=missing.column,
            path="",
            message=message,
            hint=hint,
        )


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # A module without a specification is there.
        return True


def _has_code_before(spec: JobSpec, entry: Path) -> bool:
    """Return whether packages that contain the entry run code of their own first."""
    root = spec.code_directory
    if spec.code.script is not None:
        return False
    if not entry.is_relative_to(root):
        return True
    above = entry.parent
    if entry.name == "__init__.py":
        # Its own code is the entry.
        above = entry.parent.parent
    while above != root and above.is_relative_to(root):
        init = above / "__init__.py"
        if init.is_file() and init.stat().st_size > 0:
            return True
        above = above.parent
    return False


def _how_to_install(spec: JobSpec, missing: MissingPackage) -> str:
    requirements = spec.code.requirements
    package = missing.package or missing.module
    if requirements is not None:
        named = read_requirements(spec.code_directory, requirements).names
        if named is None or package.lower() in named:
            return f"submit with --install, which installs {requirements} for the run"
    # Whoever likes may publish a package of any name, so a name that is only guessed is no command to type.
    which = missing.package or f"the package that has {missing.module}"
    if requirements is not None:
        return f"add {which} to {requirements}, and submit with --install"
    install = pip_install(package) if missing.package else f"install {which}"
    return f"{install}; for SageMaker name it in a file, and the file in code.requirements"
