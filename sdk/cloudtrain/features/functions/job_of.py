"""A job from a function or a Task class: its source as a code folder, and the fields of a job file."""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cloudtrain.client.home import make_home
from cloudtrain.console import print_message
from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.features.functions.arguments import check_arguments, check_code, known_fields
from cloudtrain.features.functions.cells import UNREAD, ExecutedCode, executed_code, module_name
from cloudtrain.features.functions.collecting import SHOWN, collect
from cloudtrain.features.functions.comparison import Sent, check_sent
from cloudtrain.features.functions.local_modules import LocalModules, find_local_modules
from cloudtrain.features.functions.pieces import Collection
from cloudtrain.features.functions.problem_places import with_cells
from cloudtrain.features.functions.remote_mark import function_of
from cloudtrain.features.functions.writing import write_module
from cloudtrain.job.document import Document, SourceLocation, read_document
from cloudtrain.job.job_fields import JobFields
from cloudtrain.job.job_text import document_text, job_document
from cloudtrain.job.loader import apply_overrides, override_texts
from cloudtrain.job.sections.cluster import Cluster
from cloudtrain.job.spec import JobSpec, LoadedJob, check_document
from cloudtrain.support.job_file import find_job_files
from cloudtrain_runtime.contract.function_arguments import spell_argument

CODE_FOLDER: Final = "functions"
"""Folder in that of local runs with the code of functions, by its digest."""
_OURS: Final = "# Written by cloudtrain from a function; written again, it is replaced."
"""First line of a job file that `write_job` has written."""
_NAME_CHARACTERS: Final = 42
_CALLER: Final = """\
# Written by cloudtrain: each rank calls {name} with the arguments of the job.
from cloudtrain_runtime.process.function_call import run_function
from cloudtrain_runtime.process.notebook_cells import name_cells

# Tracebacks name the cells of the notebook.
name_cells()

from {module} import {name}  # noqa: E402

if __name__ == "__main__":
    run_function({name})
"""


@dataclass(frozen=True)
class WrittenCode:
    """The code folder of a function or class.

    Attributes:
        name: Name of the function or class.
        entry: `task` or `script`, and its value in `code`.
        files: Content by name.
        packages: Folders that the code imports.
        notes: What the reader should know, such as a setting of a library that the run does not have.
    """

    name: str
    entry: tuple[str, str]
    files: Mapping[str, bytes] = field(repr=False)
    packages: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of its files' names and content."""
        found = hashlib.sha256()
        for name in sorted(self.files):
            found.update(f"{name}\0{len(self.files[name])}\0".encode())
            found.update(self.files[name])
        return found.hexdigest()

    def write(self, folder: Path) -> None:
        """Write the files into a folder, which is made."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def job_of(
    code: Any,
    args: Mapping[str, Any] | None = None,
    *,
    job: JobSpec | str | Path | None = None,
    name: str | None = None,
    **fields: Any,
) -> JobSpec:
    """Return the job that runs a function in each rank, or trains a Task.

        cloudtrain.job_of(MyTask, {"layers": 4}, instances=2, train={"epochs": 3})

    Its code is the source of the function or class and of what it uses: from the cells of the notebook, or from the
    script or module that defines it.

    Args:
        code: A function or a Task class at the top level of a cell or file.
        args: Its keyword arguments.
        job: A job with further fields, or the path of its file; its `code` entry is replaced.
        name: Name of the job; by default that of the function or class.
        fields: Fields of a job file by their names, such as `train={"epochs": 3}`; fields of `cluster` may be given
            without it, such as `instances=2`.

    Raises:
        SpecError: Something that the code uses cannot travel, or a field is wrong. The error names everything.
        UserError: It is no function or class, or the arguments do not fit it.
    """
    code = function_of(code)
    check_code(code)
    check_arguments(code, args or {})
    content, base = _document(job)
    given = {"name": name or content.get("name"), **fields}
    written = read_code(code, _environ(content, fields))
    for each in written.notes:
        print_message(each)
    document = _document_of(written, f"{code.__name__}()", content, args or {}, given, base)
    return _checked(document, base).valid_spec()


def make_job(
    written: WrittenCode,
    label: str,
    args: Mapping[str, Any],
    fields: Mapping[str, Any],
    *,
    base: Path,
    job: Path | None = None,
    overrides: Iterable[str] = (),
    instances: int | None = None,
) -> LoadedJob:
    """Return the job of code that was read from a notebook's file.

    Args:
        written: Its code folder.
        label: What messages call it.
        args: Arguments of the function or class.
        fields: Fields of the job.
        base: Where relative paths start.
        job: A job file with further fields.
        overrides: `path=value`, as the `--set` option takes them.
        instances: Replaces `cluster.instances`.

    Raises:
        UserError: There is no such field, or an override is malformed.
    """
    content, base = ({"cluster": {}}, base) if job is None else _document(job)
    given = {"name": content.get("name"), **fields}
    for each in written.notes:
        print_message(each)
    document = _document_of(written, label, content, args, given, base)
    apply_overrides(document, override_texts(overrides), instances=instances)
    return _checked(document, base)


def _checked(document: Document, base: Path) -> LoadedJob:
    return with_cells(check_document(document, base), Path(document.data["code"]["directory"]))


def _document_of(
    written: WrittenCode,
    label: str,
    content: dict[str, Any],
    args: Mapping[str, Any],
    fields: Mapping[str, Any],
    base: Path,
) -> Document:
    written, fields = _with_requirements(written, fields, base)
    section = _code_section(content, written, args)
    section["directory"] = str(_store(written))
    content["code"] = section
    _apply_fields(content, fields)
    content["name"] = content.get("name") or job_name(written.name)
    return Document(label, content, {(): SourceLocation(label)})


def _with_requirements(
    written: WrittenCode, fields: Mapping[str, Any], base: Path
) -> tuple[WrittenCode, Mapping[str, Any]]:
    """Copy a requirements file from beside the notebook or job file into the code."""
    given = fields.get("requirements")
    path = base / str(given)
    if given is None or not path.is_file():
        return written, fields
    files = {**written.files, path.name: path.read_bytes()}
    return replace(written, files=files), {**fields, "requirements": path.name}


def _environ(content: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the job's own variables, without those that are secrets."""
    given = {**(content.get("code", {}).get("env") or {}), **(fields.get("env") or {})}
    return {
        name: str(value) for name, value in given.items() if isinstance(value, str | int | float)
    }


def read_code(code: Any, environ: Mapping[str, str]) -> WrittenCode:
    """Return the code folder of a function or class.

    Args:
        code: It.
        environ: The job's own variables.

    Raises:
        SpecError: Something that it uses cannot travel.
    """
    is_task = isinstance(code, type)
    if code.__module__ == "__main__":
        return code_of_cells(code.__name__, code, executed_code(), environ, is_task=is_task)
    return _from_module(code, environ)


def code_of_cells(
    name: str,
    value: Any,
    executed: ExecutedCode,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    is_task: bool,
) -> WrittenCode:
    """Return the code folder of a function or class of a notebook or script.

    Args:
        name: Its name.
        value: The function or class; `UNREAD` where only its code is known.
        executed: The code.
        environ: The job's own variables.
        is_task: Whether it is a Task class.

    Raises:
        SpecError: Something that it uses cannot travel, or would be something else in the run.
    """
    found = collect(value, name, executed)
    local = find_local_modules(found.modules, executed.folder)
    module = module_name(executed.title, executed.folder)
    text = write_module(found, executed.title, is_lazy=executed.is_lazy)
    files = {f"{module}.py": text.encode(), **_copied(local)}
    written = _with_entry(name, module, files, local, is_task=is_task)
    if value is not UNREAD:
        values = {
            each: function_of(executed.names[each])
            for each in found.pieces
            if each in executed.names and each != SHOWN
        }
        _check(written, Sent(module, values, found, local, executed.title, environ))
    return replace(written, notes=tuple(sorted(set(found.notes))))


def _from_module(code: Any, environ: Mapping[str, str]) -> WrittenCode:
    """Return the code of an imported function or class: its module as it is."""
    local = find_local_modules([code.__module__], Path.cwd())
    if not (local.files or local.packages):
        raise UserError(
            f"{code.__name__} is of {code.__module__}, which is an installed package",
            "write a function or class of your own that uses it",
        )
    if "." in code.__qualname__:
        raise UserError(
            f"{code.__qualname__} is defined inside another",
            "define it at the top level of its module",
        )
    module = code.__module__
    is_task = isinstance(code, type)
    written = _with_entry(code.__name__, module, _copied(local), local, is_task=is_task)
    values, found = {code.__name__: code}, Collection()
    _check(written, Sent(module, values, found, local, module, environ))
    return replace(written, notes=tuple(sorted(set(found.notes))))


def _check(written: WrittenCode, sent: Sent) -> None:
    """Compare what the run will have with what this process has."""
    with tempfile.TemporaryDirectory() as folder:
        written.write(Path(folder))
        check_sent(sent, Path(folder))


def _with_entry(
    name: str, module: str, files: Mapping[str, bytes], local: LocalModules, *, is_task: bool
) -> WrittenCode:
    if is_task:
        return WrittenCode(name, ("task", f"{module}:{name}"), files, local.packages)
    caller = f"call_{name}.py"
    text = _CALLER.format(name=name, module=module)
    files = {**files, caller: text.encode()}
    return WrittenCode(name, ("script", caller), files, local.packages)


def _copied(local: LocalModules) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in local.files}


def _store(written: WrittenCode) -> Path:
    """Return the folder with the code, below that of local runs; equal code has one folder."""
    parent = make_home() / CODE_FOLDER
    folder = parent / written.digest[:16]
    if folder.is_dir():
        return folder
    parent.mkdir(exist_ok=True)
    # It appears when it is complete.
    with tempfile.TemporaryDirectory(dir=parent, prefix=".") as temporary:
        new = Path(temporary) / "code"
        written.write(new)
        try:
            new.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
    return folder


def write_job(job: JobSpec, folder: str | Path) -> Path:
    """Write a job that `job_of` has returned into a folder: its code, and `job.yaml`, whose path is returned.

    Files in a folder that it has written before are replaced.

    Raises:
        UserError: The folder has other files, or cannot be written.
    """
    folder = Path(folder)
    try:
        if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
            raise UserError(f"{folder} has files already", "give another folder")
        shutil.copytree(job.code_directory, folder, dirs_exist_ok=True)
        document = job_document(job, folder)
        del document["code"]["directory"]
        path = folder / "job.yaml"
        path.write_text(f"{_OURS}\n{document_text(document)}", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written: {error.strerror}", "give another folder"
        ) from None
    return path


def _is_ours(folder: Path) -> bool:
    path = folder / "job.yaml"
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(_OURS)


def _document(job: JobSpec | str | Path | None) -> tuple[dict[str, Any], Path]:
    """Return the document of the defaults, and where its relative paths start."""
    if job is None:
        return {"cluster": {}}, Path.cwd()
    if isinstance(job, JobSpec):
        return copy.deepcopy(job.to_document()), job.base
    # Its code is replaced, so that it needs none.
    path = Path(find_job_files(str(job))[0])
    content = copy.deepcopy(read_document(path).data)
    content.setdefault("cluster", {})
    return content, path.resolve().parent


def _code_section(
    document: Mapping[str, Any], written: WrittenCode, args: Mapping[str, Any]
) -> dict[str, Any]:
    section = {
        name: value
        for name, value in document.get("code", {}).items()
        if name in ("env", "outputs", "requirements")
    }
    kind, entry = written.entry
    section[kind] = entry
    if args:
        is_task = kind == "task"
        section["args"] = {key: _spell(key, value, is_task=is_task) for key, value in args.items()}
    if written.packages:
        section["include"] = [str(each) for each in written.packages]
    return section


def _spell(name: str, value: Any, *, is_task: bool) -> Any:
    part = _other_part(value, name, is_json=is_task)
    if part is not None:
        raise UserError(
            f"{part} is no argument of a {'Task' if is_task else 'job'}",
            "pass numbers (of NumPy: x.item()), text, lists or dicts, and make the rest inside",
        )
    return value if is_task else spell_argument(value)


def _other_part(value: Any, where: str, *, is_json: bool) -> str | None:
    """Return the part of a value that would arrive as another one; None without one."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return None
    if kind not in ((dict, list) if is_json else (dict, list, tuple, set)):
        return f"{where}, a {kind.__name__},"
    if kind is dict and is_json and any(type(key) is not str for key in value):
        return f"{where}, a dict with keys that are no text,"
    parts = value.items() if kind is dict else enumerate(value)
    for key, part in parts:
        found = _other_part(part, f"{where}[{key!r}]", is_json=is_json)
        if found is None and kind is dict:
            found = _other_part(key, f"the key {key!r} of {where}", is_json=is_json)
        if found is not None:
            return found
    return None


def _apply_fields(document: dict[str, Any], fields: Mapping[str, Any]) -> None:
    known = {*JobFields.model_fields} - {"code"}
    for name, value in fields.items():
        if name in known:
            old = document.get(name)
            is_merged = isinstance(old, dict) and isinstance(value, Mapping)
            document[name] = {**old, **value} if is_merged and old is not None else value
        elif name in Cluster.model_fields:
            document.setdefault("cluster", {})[name] = value
        elif name in ("env", "requirements"):
            document["code"][name] = value
        else:
            raise UserError(f"{name}: unknown field", did_you_mean(name, known_fields()))


def job_name(name: str) -> str:
    """Return the name of a job for a function or class: `train_model` gives `train-model`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)
    return (
        re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-").lower()[:_NAME_CHARACTERS].strip("-")
        or "job"
    )
