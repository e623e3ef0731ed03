"""Checks of what a job refers to on this machine: folders, files, the Task or script, local data.

The source of a Task or script is parsed and never imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import keyword
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.errors import did_you_mean, nearest
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.document import SourceLocation, dotted
from cloudtrain.job.job_fields import JobFields
from cloudtrain.job.sections.train import Train
from cloudtrain.job.static_analysis.module_search import (
    entry_file,
    is_in_src,
    may_be_installed,
    runnable_file,
)
from cloudtrain.job.written_paths import hint_of_written_path
from cloudtrain.support.data_files import data_files
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.file_pointers import (
    SUBMODULE,
    enclosing_submodule,
    find_pointers,
    pointer_kind_of,
)
from cloudtrain.support.notebook.summary import count
from cloudtrain_runtime.contract import task_signatures
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.placeholders import PLACEHOLDERS, names_in
from cloudtrain_runtime.contract.task_methods import TaskDiagnostic, training_step_conflicts

_SOURCE = lazy_pattern(r"[^\s$/-][^\s$]*\.(?:py|sh)")
"""A word of a command that names a Python or shell script below the working folder."""
_COMMAND_HINT = "name a file of the code folder; the command starts there"
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_SRC_HINT = "the code has a src layout: end code.directory with /src, which is then first on the import path"


def check_references(spec: JobFields) -> Iterator[Diagnostic]:
    """Yield an error for each file or folder that a job refers to and that is missing or of the wrong kind."""
    yield from _check_code(spec)
    for name, channel in spec.data.items():
        if channel.local_path is not None and ":/" not in channel.local_path:
            yield from _check_channel(spec, name, spec.base / channel.local_path)


def _check_code(spec: JobFields) -> Iterator[Diagnostic]:
    code = spec.code
    directory = spec.code_directory
    if wrong := _check_folder(("code", "directory"), directory):
        yield wrong
        return
    yield from _check_includes(spec)
    if pointers := list(_check_content(spec)):
        yield from pointers
        return
    for field, name in (("script", code.script), ("requirements", code.requirements)):
        if name is not None:
            yield from _check_file(field, directory / name)
    if code.module is not None:
        # Requirements and other images may bring it.
        is_installed = (
            code.requirements is not None
            or spec.cluster.image is not None
            or may_be_installed(code.module, directory)
        )
        root = spec.import_root(code.module)
        found = _check_module(root, code.module, may_be_installed=is_installed)
        yield from _with_requirements(spec, found)
    yield from _check_command(spec)
    if code.task is not None:
        root = spec.import_root(code.task)
        arguments = code.args if isinstance(code.args, Mapping) else None
        found = _check_task(root, code.task, arguments)
        yield from _with_requirements(spec, found)
        if spec.train is not None:
            yield from _check_task_methods(root, code.task, spec.train)


def _check_content(spec: JobFields) -> Iterator[Diagnostic]:
    """Yield an error for each file that `code` names and that is there by name only, such as a Git LFS pointer."""
    code = spec.code
    fields = {"task": code.task, "script": code.script, "module": code.module}
    named = [(field, entry_file(spec)) for field, value in fields.items() if value is not None]
    if code.requirements is not None:
        named.append(("requirements", spec.code_directory / code.requirements))
    named += [("command", spec.code_directory / word) for word in code.command or ()]
    for field, path in named:
        if path is not None and (kind := pointer_kind_of(path)) is not None:
            yield Diagnostic(f"{path} {kind.singular}", ("code", field), kind.fix)


def _check_task_methods(directory: Path, task: str, train: Train) -> Iterator[Diagnostic]:
    """Yield an error for each field of `train` that needs a method that the Task lacks, or excludes one that it has."""
    for method, at_method in train.parallel.methods.items():
        if task_signatures.has_method(directory, task, method) is False:
            message = f"requires a method {method}() of {task.rpartition(':')[2]}, which defines how its layers are split"
            hint = f"write it (docs/how-to/parallelism.md shows one), or remove {at_method[-1]}"
            yield Diagnostic(message, at_method, hint)
    if train.parallel.pipeline > 1 and task_signatures.has_method(directory, task, "after_step"):
        message = "does not work with after_step(), because each rank has only some of the weights"
        yield Diagnostic(
            message, ("train", "parallel", "pipeline"), "use data: fsdp, or remove after_step()"
        )
    if task_signatures.has_method(directory, task, "training_step"):
        for names in training_step_conflicts(train):
            message = (
                "does not work with training_step(), which takes the steps of several optimizers"
            )
            yield Diagnostic(message, ("train", *names), "remove one of them")


def _check_includes(spec: JobFields) -> Iterator[Diagnostic]:
    for index, written in enumerate(spec.code.include):
        folder = Path(os.path.normpath(spec.base / written))
        wrong = _check_folder(("code", "include", index), folder)
        if wrong:
            yield wrong
        else:
            yield from _check_include(spec, index, folder)


def _check_include(spec: JobFields, index: int, folder: Path) -> Iterator[Diagnostic]:
    """Yield what is wrong with an entry of `code.include`, whose folder exists: the first mistake."""
    found = next((each for check in _CHECKS for each in check(spec, index, folder)), None)
    if found is not None:
        yield Diagnostic(found[0], ("code", "include", index), found[1])


_Found = Iterator[tuple[str, str]]
"""Messages with their hints."""


def _overlap(spec: JobFields, index: int, folder: Path) -> _Found:  # noqa: ARG001 (the checks' signature)
    inside = folder.resolve()
    code = spec.code_directory.resolve()
    if inside.is_relative_to(code):
        yield f"{folder} is in the code folder", "remove it: the code folder travels as it is"
    elif code.is_relative_to(inside):
        yield f"{folder} contains the code folder", "name the package in it alone"


def _unimportable(spec: JobFields, index: int, folder: Path) -> _Found:  # noqa: ARG001
    name = folder.name
    packages = _packages_hint(spec, folder)
    if not name.isidentifier() or keyword.iskeyword(name):
        hint = ", or ".join(filter(None, (packages, "rename the folder")))
        yield f'the code imports an included folder by its name, and "{name}" is not one', hint
    has_project_file = any((folder / file).is_file() for file in _PROJECT_FILES)
    is_package = (folder / "__init__.py").is_file()
    if has_project_file and not is_package and packages:
        yield f"{folder} is a project; import {name} would not find the package in it", packages


def _name_clash(spec: JobFields, index: int, folder: Path) -> _Found:
    name = folder.name
    directory = spec.code_directory
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


def _packages_hint(spec: JobFields, folder: Path) -> str:
    """Return a hint with the packages in a folder, or an empty text."""
    found = [os.path.relpath(each, spec.base) for each in _packages(folder)]
    if not found:
        return ""
    return f"did you mean {' or '.join(found[:3])}?"


def _packages(folder: Path) -> Iterator[Path]:
    for parent in (folder / "src", folder):
        if parent.is_dir():
            found = sorted(each.parent for each in parent.glob("*/__init__.py"))
            yield from (
                each
                for each in found
                if each.name.isidentifier() and each.name not in ("test", "tests")
            )


def _check_folder(at: FieldPath, path: Path) -> Diagnostic | None:
    if not _exists(path):
        return _missing(at, path, "folder")
    if path.is_dir():
        return None
    hint = "name the folder that holds it"
    return Diagnostic(f"expected a folder, but {path} is a file", at, hint)


def _check_file(field: str, path: Path) -> Iterator[Diagnostic]:
    at = ("code", field)
    if not _exists(path):
        yield _missing(at, path, "file")
    elif not path.is_file():
        yield Diagnostic(f"expected a file, but {path} is a folder", at, "name a file in it")
    elif field == "script" and path.suffix != ".py":
        yield Diagnostic(
            f"expected a Python script, got {path.name}", at, "name a file that ends in .py"
        )
    elif field == "script":
        yield from _check_syntax("script", path)


def _with_requirements(spec: JobFields, found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Add to the hint about a src layout that the requirements file must be below src, too."""
    written = spec.code.requirements
    for each in found:
        if (
            each.hint != _SRC_HINT
            or written is None
            or (spec.code_directory / "src" / written).exists()
        ):
            yield each
        else:
            move = f"{_SRC_HINT}; copy {written} into src, where code.requirements then finds it"
            yield dataclasses.replace(each, hint=move)


def _check_module(directory: Path, module: str, *, may_be_installed: bool) -> Iterator[Diagnostic]:
    """Yield the errors in a module of the code folder, or that it is neither there nor in any installed package."""
    at = ("code", "module")
    top = module.partition(".")[0]
    path = directory / module.replace(".", "/")
    names = [each.name for each in directory.iterdir()]
    if (file := runnable_file(directory, module)) is not None:
        yield from _check_syntax("module", file)
    elif path.is_dir():
        yield Diagnostic(
            f"{path} has no __main__.py", at, f"name a module in it, such as {module}.train"
        )
    elif top in names or f"{top}.py" in names:
        yield _missing(at, path.with_name(f"{path.name}.py"), "file")
    elif is_in_src(directory, top):
        yield Diagnostic(f"{top} is in {directory / 'src'}", at, _SRC_HINT)
    elif not may_be_installed:
        hint = "for a module of an installed package, name the package in code.requirements"
        modules = [name.removesuffix(".py") for name in names]
        yield Diagnostic(
            f"there is no module {top} in {directory}", at, did_you_mean(top, modules, hint)
        )


def _check_command(spec: JobFields) -> Iterator[Diagnostic]:
    """Yield an error for each unknown placeholder, and for a script or program that the code folder lacks."""
    command = spec.code.command
    directory = spec.code_directory
    if not command:
        return
    channels = [f"SM_CHANNEL_{name.upper()}" for name in spec.data]
    known = [*PLACEHOLDERS, *channels, *spec.code.env]
    args = spec.code.args
    arguments = args.items() if isinstance(args, dict) else enumerate(args)
    words: list[tuple[FieldPath, object]] = [
        (("code", "command", index), word) for index, word in enumerate(command)
    ]
    words += [(("code", "args", key), value) for key, value in arguments]
    for at, value in words:
        for name in names_in(str(value)):
            if name not in known:
                near = nearest(name, known)
                hint = f"for the text ${name} write $${name}"
                if near:
                    hint = f"did you mean ${near}?"
                yield Diagnostic(f"there is no variable ${name} for commands", at, hint)
    source = next(
        ((index, word) for index, word in enumerate(command) if _SOURCE.fullmatch(word)), None
    )
    if source is not None and not (directory / source[1]).is_file():
        yield _missing(("code", "command", source[0]), directory / source[1], "file", _COMMAND_HINT)
    program = directory / command[0]
    is_in_code_folder = "/" in command[0] and not command[0].startswith("/")
    # A program without a slash is one of the container's.
    if source == (0, command[0]) and "/" not in command[0]:
        hint = f"write ./{command[0]}, or [bash, {command[0]}]"
        yield Diagnostic(
            f"{command[0]} is not on the search path of programs", ("code", "command", 0), hint
        )
    elif command[0].startswith("./") and not program.is_file():
        yield _missing(("code", "command", 0), program, "file", _COMMAND_HINT)
    elif is_in_code_folder and program.is_file() and not os.access(program, os.X_OK):
        hint = f"chmod +x {command[0]}, or start it by its interpreter: [bash, {command[0]}]"
        yield Diagnostic(f"{program} is not executable", ("code", "command", 0), hint)


def check_program(spec: JobFields) -> Iterator[Diagnostic]:
    """Yield an error if this machine lacks the program that a local run would start."""
    if not spec.code.command:
        return
    program = spec.code.command[0]
    is_in_code_folder = "/" in program and not program.startswith("/")
    if is_in_code_folder or "$" in program:
        return
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    if program and shutil.which(program, path=path) is None:
        hint = "install it, or run the job where it is installed"
        yield Diagnostic(f"this machine has no program {program}", ("code", "command", 0), hint)


def _check_channel(spec: JobFields, name: str, path: Path) -> Iterator[Diagnostic]:
    at = ("data", name, "uri")
    instances = spec.cluster.preferred_instances
    if not _exists(path):
        yield _missing(at, path, "file or folder")
        return
    if not path.is_dir() and not path.is_file():
        yield Diagnostic(
            f"expected a file or folder, but {path} is neither", at, "name the data itself"
        )
    elif spec.code_directory.resolve().is_relative_to(path.resolve()):
        message = f"{path.resolve()} contains the code folder, which would be uploaded as data"
        yield Diagnostic(message, at, "name a folder that contains only the data")
    elif path.is_dir() and not _count_files(path, 1):
        pointers = find_pointers(path)
        what = f"; {pointers.message}" if pointers.message else ""
        hint = pointers.hint or "put the data there, or name another folder"
        yield Diagnostic(f"there are no files in {path}{what}", at, hint)
    elif spec.data[name].sharded and (found := _count_files(path, instances)) < instances:
        message = f"{count(found, 'file')} for {count(instances, 'instance')}: {instances - found} would get none"
        hint = f"use at least {instances} files, or sharded: false"
        yield Diagnostic(message, ("data", name, "sharded"), hint, (at, ("cluster", "instances")))


def _check_task(
    directory: Path, task: str, arguments: Mapping[str, Any] | None
) -> Iterator[Diagnostic]:
    """Yield the errors in a Task and its arguments that its source proves.

    A class that is imported or created dynamically is not checked; without arguments, these are not.
    """
    for found in task_signatures.check_task(directory, task, arguments or {}):
        at: FieldPath = found.field or ("code", "task")
        if at[:2] == ("code", "args") and arguments is None:
            continue
        location = None
        if found.file:
            path = directory / found.file
            here = Path.cwd()
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            location = SourceLocation(str(shown), found.line, found.column)
        is_key = len(at) > len(("code", "args"))
        hint = found.hint
        is_missing = found.message.startswith("no such file")
        if is_missing and is_in_src(directory, task.partition(".")[0]):
            hint = _SRC_HINT
        yield Diagnostic(found.message, at, hint, is_key=is_key, location=location)


def _check_syntax(field: str, path: Path) -> Iterator[Diagnostic]:
    broken = task_signatures.parse(path, str(path))
    if isinstance(broken, TaskDiagnostic):
        line = f":{broken.line}" if broken.line else ""
        version = ".".join(map(str, sys.version_info[:2]))
        hint = f"fix it, or, if it needs a newer Python than {version}, run cloudtrain with that version"
        yield Diagnostic(f"{path}{line} {broken.message}", ("code", field), hint)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # Too long, a NUL, a loop of links, or no permission.
        return False


def _missing(
    at: FieldPath,
    path: Path,
    kind: str,
    hint: str = "relative paths start at the folder of the job file",
) -> Diagnostic:
    if submodule := enclosing_submodule(path):
        message = f"no such {kind}: {path}; {submodule} {SUBMODULE.singular}"
        return Diagnostic(message, at, SUBMODULE.fix)
    field = dotted(at[:-1] if at[-1] == "uri" else at)
    if written := hint_of_written_path(path, field):
        return Diagnostic(f"no such {kind}: {path}", at, written)
    names: list[str] = []
    # There may be no such folder, or no permission to list it.
    with contextlib.suppress(OSError, ValueError):
        names = [other.name for other in path.parent.iterdir()]
    return Diagnostic(f"no such {kind}: {path}", at, did_you_mean(path.name, names, hint))


def _count_files(path: Path, limit: int) -> int:
    """Return the number of files below a path, at most `limit`, without listing more than needed."""
    return sum(1 for _ in itertools.islice(data_files(path), limit))
